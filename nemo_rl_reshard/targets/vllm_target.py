"""VllmTarget: one rank of a vLLM engine as the receiving end of refits."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nemo_rl_reshard.errors import FaultList, StateError, TargetError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.manifest import Manifest, Side
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.targets.coverage import Coverage, WriteCount
from nemo_rl_reshard.targets.derived_caches import DerivedCaches, Hook
from nemo_rl_reshard.targets.engine_checks import Placement, refuse_quantised, weights_in_place
from nemo_rl_reshard.targets.tied_values import TiedValues
from nemo_rl_reshard.targets.vllm_compat import VllmNames, find_names
from nemo_rl_reshard.targets.vllm_layers import VllmLayers
from nemo_rl_reshard.targets.vllm_trace import ModelTrace, trace_model
from nemo_rl_reshard.targets.write_modes import LayerMode, WriteMode, decide_modes


@dataclass(slots=True)
class _Setup:
    """What set-up found out; valid until the next `manifest`."""

    trace: ModelTrace
    modes: Mapping[str, LayerMode]
    layers_of: Mapping[str, frozenset[str]]
    coverage: Coverage
    caches: DerivedCaches
    tied: TiedValues
    placement: Placement


@dataclass(slots=True)
class _Refit:
    """One refit in progress: what has arrived, what each packed layer lacks, what waits for the rest of its group."""

    version: int
    lacking: dict[str, set[str]]
    arrived: set[str] = field(default_factory=set)
    processed: set[str] = field(default_factory=set)
    waiting: dict[str, torch.Tensor] = field(default_factory=dict)


class VllmTarget:
    """Traces the engine's loader once, then takes refits: writes in place where proven, else layer by layer.

    `model` is this rank's model, `vllm_config` its configuration. `mode` is `auto`, `live` (refuse what cannot be
    written in place) or `packed` (restore, write, process every layer that has a post-load step). `hooks` maps the
    class name of a module that keeps something derived from its parameters to the step that makes it anew.
    `asleep()` says whether the engine sleeps. Methods are those of the runtime's `Target`; call them between requests.
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: Any,
        mode: str = "auto",
        hooks: Mapping[str, Hook] | None = None,
        asleep: Callable[[], bool] = lambda: False,
        names: VllmNames | None = None,
    ) -> None:
        self._layers = VllmLayers(model, vllm_config, names or find_names())
        self._config = vllm_config
        self._mode = WriteMode(mode)
        self._hooks = dict(hooks or {})
        self._asleep = asleep
        self._setup: _Setup | None = None
        self._refit: _Refit | None = None
        self._torn: list[str] = []
        self.version: int | None = None
        self.peak_extra_bytes = 0

    @property
    def trace(self) -> ModelTrace:
        """Where each checkpoint tensor lands. Raises StateError before `manifest`."""
        return self._ready().trace

    @property
    def modes(self) -> Mapping[str, LayerMode]:
        """How each layer is written, and why. Raises StateError before `manifest`."""
        return self._ready().modes

    @property
    def device(self) -> torch.device:
        """Where the model's weights lie."""
        return next((parameter.device for parameter in self._layers.model.parameters()), torch.device("cpu"))

    def manifest(self, rank: int, specs: Sequence[TensorSpec]) -> Manifest:
        """Declare where each of `specs` (the trainers' tensors, checkpoint names) lands on this rank.

        Tensors of other ranks (experts, pipeline stages) and draft tensors without a drafter are left out. Raises
        TargetError listing every fault: a quantised engine, tensors the loader refuses, parameters not filled, layers
        that cannot be written as asked, derived tensors that nothing would make anew.
        """
        if self._refit is not None:
            raise StateError(f"manifest: the refit to version {self._refit.version} is still open")
        self._check_whole()
        self._setup = None
        weights_in_place(self._layers.model, self._asleep())
        refuse_quantised(self._layers, self._config)
        trace = trace_model(self._layers, specs)
        modes = decide_modes(self._layers, trace, self._mode)
        caches = DerivedCaches(self._layers, self._hooks, self._config.model_config.dtype)
        faults = FaultList("derived tensors", TargetError)
        faults.extend(caches.faults({name for name, found in modes.items() if found.mode is WriteMode.PACKED}))
        faults.raise_if_any()
        self._setup = _Setup(
            trace=trace,
            modes=modes,
            layers_of={
                tensor: frozenset(storage.rpartition(".")[0] for storage in storages)
                for tensor, storages in trace.loader.feeds.items()
            },
            coverage=Coverage(_needed(trace)),
            caches=caches,
            tied=TiedValues(self._layers, trace),
            placement=Placement(self._layers),
        )
        loader = trace.loader
        taking = [spec for spec in specs if spec.name in loader.feeds]
        return Manifest(
            rank=rank,
            side=Side.INFERENCE,
            specs=tuple(TensorSpec(spec.name, spec.shape, loader.dtypes[spec.name]) for spec in taking),
            shards=tuple(shard for spec in taking for shard in loader.shards_of(spec.name)),
            indirect=tuple((spec.name, loader.indirect[spec.name]) for spec in taking if spec.name in loader.indirect),
        )

    def begin(self, version: int) -> None:
        """Open for writing. Raises TargetError if the engine sleeps, lost its weights or moved its experts."""
        setup = self._ready()
        if self._refit is not None:
            raise StateError(f"begin: the refit to version {self._refit.version} is still open; abandon it first")
        weights_in_place(self._layers.model, self._asleep())
        setup.placement.check_experts()
        live = {layer for layer, found in setup.modes.items() if found.mode is WriteMode.LIVE}
        self._layers.pad_in_place(live, setup.trace.loader)
        setup.coverage.begin()
        setup.tied.begin()
        self.version = None
        self.peak_extra_bytes = 0
        lacking: dict[str, set[str]] = defaultdict(set)
        for tensor, layers in setup.layers_of.items():
            for layer in layers if tensor not in setup.trace.loader.tied else ():
                lacking[layer].add(tensor)
        self._refit = _Refit(version, lacking)

    def view(self, tensor: str, region: Region) -> torch.Tensor:
        """Writable elements of `region`, which lies inside one declared shard; shape `region.extent`, no copy."""
        setup, _ = self._updating("view")
        shard = next((found for found in setup.trace.loader.shards_of(tensor) if found.region.contains(region)), None)
        if shard is None:
            raise TargetError(f"{tensor}: region {region.offset}+{region.extent} is in no declared shard of this rank")
        self._open_for(tensor)
        setup.coverage.expect_write(tensor, region)
        steps = zip(region.offset, shard.region.offset, shard.view.stride, strict=True)
        base = self._layers.tensor(shard.view.storage).detach()
        start = int(base.storage_offset()) + shard.view.offset + sum((at - first) * jump for at, first, jump in steps)
        return base.as_strided(region.extent, shard.view.stride, start)

    def tensor_done(self, tensor: str) -> None:
        """Every write into and every read from this tensor's views is finished; its layer may be processed."""
        setup, _ = self._updating("tensor_done")
        shards = setup.trace.loader.shards_of(tensor)
        if not shards:
            raise TargetError(f"{tensor} has no shard on this rank")
        setup.coverage.finish_direct(tensor, shards)
        self._arrived([tensor])

    def load(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Place whole tensors with the engine's own loader. Tensors that it needs together wait for each other.

        Tensors that this rank has no use for are ignored. A reference is kept only to tensors that wait.
        """
        setup, refit = self._updating("load")
        loader = setup.trace.loader
        for name, tensor in named:
            if name in loader.tied:
                setup.tied.note(name, tensor)
                refit.arrived.add(name)
            elif name in loader.feeds:
                refit.waiting[name] = tensor
        torn = {name for group in loader.groups if not group <= refit.waiting.keys() for name in group}
        complete = [(name, tensor) for name, tensor in refit.waiting.items() if name not in torn]
        for name, _ in complete:
            del refit.waiting[name]
            self._open_for(name)
        if not complete:
            return
        model: Any = self._layers.model
        # All of them: a loader may keep a tensor and write it during a later call.
        destinations = {storage: self._layers.tensor(storage) for storage in setup.trace.layouts}
        with self._layers.configured(), torch.no_grad(), WriteCount(destinations) as count:
            model.load_weights(iter(complete))
        setup.coverage.add(count.written)
        self._arrived([name for name, _ in complete])

    def finish(self, version: int) -> None:
        """Derived tensors, tied heads, and the proof that every element was written and no tensor moved.

        Raises TargetError listing every gap; the engine then holds mixed weights and must be abandoned.
        """
        setup, refit = self._updating("finish")
        faults = FaultList(f"refit to version {version}", TargetError)
        if version != refit.version:
            faults.add(f"the refit was begun for version {refit.version}")
        missing = sorted(setup.trace.loader.feeds.keys() - refit.arrived)
        if missing:
            faults.add(f"{len(missing)} tensors never arrived: {', '.join(missing[:20])}")
        faults.extend(setup.coverage.gaps())
        faults.extend(f"layer {layer} was not processed" for layer in self._layers.open_layers)
        faults.raise_if_any()
        for layer in sorted(refit.processed):
            for follower in setup.modes[layer].followers:
                self._layers.process_again(follower)
        setup.caches.refresh()
        faults.extend(setup.tied.differences())
        faults.extend(setup.placement.changes())
        faults.raise_if_any()
        self._refit = None
        self.version = version

    def abandon(self) -> None:
        """After a failure: every layer gets its old tensors back, so that the next full refit starts clean."""
        self._refit = None
        self.version = None
        # Not raised: the failure that led here is the one to report. The next call on this engine says it.
        self._torn = self._layers.undo()

    def _open_for(self, tensor: str) -> None:
        """Open the packed layers that `tensor` lands in."""
        setup, refit = self._updating("write")
        for layer in setup.layers_of[tensor]:
            if setup.modes[layer].mode is WriteMode.LIVE or layer in self._layers.open_layers:
                continue
            if layer in refit.processed:
                raise StateError(f"{tensor}: layer {layer} was already processed in this refit")
            self._layers.open(layer, setup.trace.loader)
            self.peak_extra_bytes = max(self.peak_extra_bytes, self._layers.open_nbytes)

    def _arrived(self, tensors: Iterable[str]) -> None:
        """Note that these are in place, and process the packed layers that now lack nothing."""
        setup, refit = self._updating("write")
        for tensor in tensors:
            refit.arrived.add(tensor)
            for layer in setup.layers_of[tensor]:
                refit.lacking[layer].discard(tensor)
                if not refit.lacking[layer] and layer in self._layers.open_layers:
                    self._layers.close(layer)
                    refit.processed.add(layer)

    def _check_whole(self) -> None:
        faults = FaultList("restart the engine: an abandoned refit could not be undone", TargetError)
        faults.extend(self._torn)
        faults.raise_if_any()

    def _ready(self) -> _Setup:
        self._check_whole()
        if self._setup is None:
            raise StateError("the engine's loader has not been traced yet: call manifest first")
        return self._setup

    def _updating(self, call: str) -> tuple[_Setup, _Refit]:
        if self._refit is None:
            raise StateError(f"{call}: no refit is open on this rank: call begin first")
        return self._ready(), self._refit


def _needed(trace: ModelTrace) -> dict[str, int]:
    """Elements that a refit must write into each parameter; what only the loader can place counts as it was traced."""
    needed: dict[str, int] = defaultdict(int)
    for shards in trace.loader.places.values():
        for shard in shards:
            needed[shard.view.storage] += shard.region.numel
    for storage in trace.loader.computed:
        needed[storage] = math.prod(trace.layouts[storage].shape) if storage in trace.layouts else 0
    return dict(needed)
