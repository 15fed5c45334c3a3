"""attach: put this package's refit under an unmodified NeMo RL, between its `setup` and its training loop.

    attach(policy, policy_generation, clusters, master_config)

with what `setup` returns is all a launcher needs. The training loops of NeMo RL raise what a refit raises, except for
the first refit of the asynchronous ones, which is printed. To be sure to hear of it:

    with attach(policy, policy_generation, clusters, master_config) or nullcontext():
        async_grpo_train(...)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from nemo_rl_reshard.integrations.nemo_rl.fallback import LoopRefit, OwnRefit, ReplacedSynchronizer
from nemo_rl_reshard.integrations.nemo_rl.seams import check_seams
from nemo_rl_reshard.integrations.nemo_rl.section import NemoRlBackend, NemoRlSection, read_section
from nemo_rl_reshard.integrations.nemo_rl.settings import Settings
from nemo_rl_reshard.integrations.nemo_rl.synchronizer import ReshardWeightSynchronizer
from nemo_rl_reshard.integrations.nemo_rl.timing import LOG, show_log

_ASYNC_LOOPS = ("grpo.async_grpo", "ppo.async_ppo")


def attach(
    policy: Any, policy_generation: Any, clusters: Sequence[Any], config: Any, *, logger: Any = None
) -> ReshardWeightSynchronizer | None:
    """Have NeMo RL's loops refit `policy_generation` from `policy` as the `refit:` section of `config` says.

    `clusters` are the training and the inference cluster, `config` is NeMo RL's MasterConfig or a mapping like it; with
    `logger`, NeMo RL's, the seconds of setting up are logged as `timing/setup/reshard_*`. Returns None, and leaves
    NeMo RL as it is, for `backend: nemo_rl`, and if setting up failed under `on_failure: fall_back`.

    Raises ConfigError listing every key that is wrong or asks for something unsupported, or every seam of NeMo RL
    that is missing; else what `init_communicator` raises.
    """
    section = _section(config)
    if section is None:
        return None
    in_flight = any(_in_flight(config, loop) for loop in _ASYNC_LOOPS)
    own_refit = LoopRefit(policy, policy_generation)
    made = _attached(policy, policy_generation, clusters, section, in_flight=in_flight, own_refit=own_refit)
    if made is None:
        return None
    before = policy_generation.weight_synchronizer
    if before is not None:
        before.shutdown()
    policy_generation.weight_synchronizer = made
    if logger is not None:
        logger.log_metrics(made.setup_metrics, step=0, prefix="timing/setup")
    return made


def attach_single_controller(actor_args: Any, config: Any) -> ReshardWeightSynchronizer | None:
    """`attach` for NeMo RL's single controller: replaces the synchronizer in what its `setup` made for the actor.

    That controller never stops requests for a refit, so they go on in flight. Returns and raises as `attach` does.
    """
    section = _section(config)
    if section is None:
        return None
    generation = actor_args.gen_handle
    made = _attached(
        actor_args.trainer_handle,
        generation,
        (actor_args.train_cluster, actor_args.inference_cluster),
        section,
        in_flight=bool(generation.cfg["vllm_cfg"]["async_engine"]),
        own_refit=ReplacedSynchronizer(actor_args.weight_synchronizer),
    )
    if made is not None:
        # The controller builds a world from its own process.
        made.leave()
        actor_args.weight_synchronizer = made
    return made


def _section(config: Any) -> NemoRlSection | None:
    """The section, None if refits are left to NeMo RL."""
    show_log()
    section = read_section(config)
    if section.backend is NemoRlBackend.NEMO_RL:
        LOG.info("refit.backend: nemo_rl: NeMo RL refits by itself")
        return None
    return section


def _attached(
    policy: Any,
    policy_generation: Any,
    clusters: Sequence[Any],
    section: NemoRlSection,
    *,
    in_flight: bool,
    own_refit: OwnRefit,
) -> ReshardWeightSynchronizer | None:
    """A synchronizer that is set up, or None where NeMo RL's own refit has to do."""
    start_s = time.perf_counter()
    checked = check_seams(policy, policy_generation, clusters, section.setup_s)
    if in_flight:
        LOG.info("engines are refitted with requests in flight; the loop says itself when prefix caches are dropped")
    made = ReshardWeightSynchronizer(
        checked.trainers,
        checked.engines,
        section,
        architecture=checked.architecture,
        in_flight=in_flight,
        own_refit=own_refit,
    )
    made.note_setup("reshard_seams_time_s", time.perf_counter() - start_s)
    _register()
    try:
        made.init_communicator()
    except Exception as error:
        if not made.may_fall_back(error):
            raise
        made.fall_back()
        return None
    return made


def _in_flight(config: Any, loop: str) -> bool:
    """Whether an asynchronous `loop` is on and refits engines that are generating."""
    settings = Settings(config)
    return bool(
        settings.at(f"{loop}.enabled")
        and settings.at(f"{loop}.in_flight_weight_updates")
        and settings.at("policy.generation.vllm_cfg.async_engine")
    )


def _register() -> None:
    """Let `isinstance(synchronizer, WeightSynchronizer)` hold wherever NeMo RL asks it."""
    try:
        from nemo_rl.weight_sync.interfaces import WeightSynchronizer
    except ImportError:
        return
    WeightSynchronizer.register(ReshardWeightSynchronizer)
