"""Every symbol of NeMo RL that the plugin relies on exists in the checkout, with the parameters it is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl_reshard.cli.source_names import SourceNames
from nemo_rl_reshard.integrations.nemo_rl.upstream import SYMBOLS, Symbol, unmet

# Importing it takes Automodel, which a checkout names and does not contain.
AUTOMODEL = "nemo_rl.models.policy.workers.dtensor_policy_worker_v2"
IMPORTED = [symbol for symbol in SYMBOLS if symbol.module != AUTOMODEL]
READ = [symbol for symbol in SYMBOLS if symbol.module == AUTOMODEL]


def test_imported_symbols_are_there() -> None:
    assert list(unmet(IMPORTED)) == []


@pytest.mark.parametrize("symbol", READ, ids=lambda symbol: symbol.name)
def test_symbols_of_what_cannot_be_imported_are_in_its_source(symbol: Symbol, checkout: Path) -> None:
    assert symbol.parameters is None
    assert SourceNames(checkout / "nemo_rl").defines(symbol.module, symbol.name)


def test_b67_the_two_ways_to_an_engine_take_the_same_arguments() -> None:
    import inspect

    from nemo_rl.models.generation.vllm import checkpoint_engine as found

    sync = inspect.signature(found.VllmCheckpointEngineRpcMixin.checkpoint_engine_rpc)
    other = inspect.signature(found.VllmAsyncCheckpointEngineRpcMixin.checkpoint_engine_rpc_async)
    assert sync.parameters == other.parameters


def test_the_synchronizer_has_all_that_the_interface_demands() -> None:
    from nemo_rl.weight_sync.interfaces import WeightSynchronizer

    from nemo_rl_reshard.integrations.nemo_rl.synchronizer import ReshardWeightSynchronizer

    assert all(hasattr(ReshardWeightSynchronizer, name) for name in WeightSynchronizer.__abstractmethods__)
