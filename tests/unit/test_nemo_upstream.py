"""The table of upstream symbols: well formed, and its check tells what a release lacks."""

import sys
from types import ModuleType

import pytest

from nemo_rl_reshard.integrations.nemo_rl.members import EngineMember
from nemo_rl_reshard.integrations.nemo_rl.upstream import SYMBOLS, Symbol, unmet
from nemo_rl_reshard.orchestration.shared import Shared
from nemo_rl_reshard.params.manifest import Side


def test_the_table_is_well_formed():
    places = [(symbol.module, symbol.name) for symbol in SYMBOLS]
    assert len(set(places)) == len(places)
    for symbol in SYMBOLS:
        assert symbol.module.startswith("nemo_rl.")
        assert all(part.isidentifier() for part in symbol.name.split("."))
        assert symbol.why
        assert not symbol.why.endswith(".")


def test_b67_both_ways_to_an_engine_take_the_same_arguments():
    """What differs between synchronous and asynchronous engines is the method's name, here and in NeMo RL."""
    taken = {symbol.name.partition(".")[2]: symbol.parameters for symbol in SYMBOLS if "_rpc" in symbol.name}
    engines = [EngineMember("engine", Side.INFERENCE, 1, None, is_async=is_async) for is_async in (False, True)]
    assert taken.keys() == {engine.rpc for engine in engines}
    assert len(set(taken.values())) == 1


def test_b67_both_kinds_of_engine_are_asked_with_the_same_arguments(monkeypatch):
    asked = []

    class Method:
        def remote(self, **arguments):
            asked.append(arguments)

    class Handle:
        checkpoint_engine_rpc = checkpoint_engine_rpc_async = Method()

    monkeypatch.setattr("nemo_rl_reshard.integrations.nemo_rl.members.require_ray", lambda: None)
    for by_name in (False, True):
        asked.clear()
        for is_async in (False, True):
            member = EngineMember("engine", Side.INFERENCE, 1, Handle(), is_async=is_async, by_name=by_name)
            member.submit("connect", [{"rank": 3, "epoch": 1}])
            member.submit("adopt", [{"rank": 3, "epoch": 1}], Shared({"plan": "text"}))
        assert asked[:2] == asked[2:]
        assert asked[0]["method_args"] == ("connect", [{"rank": 3, "epoch": 1}], None)
        assert asked[1]["method_args"] == ("adopt", [{"rank": 3, "epoch": 1}], {"plan": "text"}), "no reference"


class _Owner:
    field: int

    def __init__(self):
        self.made = 1

    def method(self, first, *, second):
        """Takes two."""


def test_what_a_release_lacks_is_said_with_the_reason(monkeypatch):
    module = ModuleType("a_release")
    module.Owner = _Owner
    monkeypatch.setitem(sys.modules, "a_release", module)
    there = [
        Symbol("a_release", "Owner.field", None, "w"),
        Symbol("a_release", "Owner.made", None, "w"),
        Symbol("a_release", "Owner.method", ("first", "second"), "w"),
    ]
    assert list(unmet(there)) == []
    lacking = [
        Symbol("a_release", "Owner.gone", None, "needed for one thing"),
        Symbol("a_release", "Owner.method", ("first", "third"), "needed for another"),
        Symbol("no_such_release.module", "function", (), "needed for a third"),
    ]
    said = list(unmet(lacking))
    assert len(said) == 3
    for sentence, symbol in zip(said, lacking, strict=True):
        assert symbol.name in sentence
        assert symbol.why in sentence
    assert "takes no third" in said[1]


@pytest.mark.parametrize("name", ["sync_weights", "is_stale", "init_communicator", "shutdown"])
def test_the_synchronizer_has_the_whole_interface(name):
    from nemo_rl_reshard.integrations.nemo_rl.synchronizer import ReshardWeightSynchronizer

    (symbol,) = (symbol for symbol in SYMBOLS if symbol.name == f"WeightSynchronizer.{name}")
    assert list(unmet([Symbol(ReshardWeightSynchronizer.__module__, f"ReshardWeightSynchronizer.{name}",
                              symbol.parameters, symbol.why)])) == []  # fmt: skip
