"""Live tensors by name: where a source finds what training holds now. Any framework can provide them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch.distributed.fsdp import FSDPModule

from nemo_rl_reshard.errors import DeclarationError
from nemo_rl_reshard.sources.low_rank import LowRank, adapted
from nemo_rl_reshard.sources.naming import StackedExperts


class LiveTensors(Protocol):
    """Named training tensors, DTensors or plain ones."""

    def refresh(self) -> None:
        """Bring the tensors to their layout at rest and notice replaced ones. Changes no weight."""

    def names(self) -> Iterable[str]:
        """Every name that a checkpoint would hold, in model order, adapters and aliases included."""

    def current(self, name: str) -> torch.Tensor:
        """The tensor that carries `name` now. Raises DeclarationError when it is gone or is no whole weight."""

    def stacked(self, name: str) -> StackedExperts | None:
        """What the owner of a stacked expert tensor says of its form, if it says anything."""

    def low_rank(self, name: str) -> LowRank | None:
        """The LoRA layer whose base weight is `name`, when its merged value is yet to be computed."""


class NamedTensors:
    """Live tensors given by name. A mapping is read anew each time, so a replaced value is seen.

    `merged` says that adapters, where there are any, are merged into the base weights.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], *, merged: bool = False
    ) -> None:
        self._tensors = tensors if isinstance(tensors, Mapping) else dict(tensors)
        self._merged = merged

    def refresh(self) -> None:
        """Nothing to settle."""

    def names(self) -> Iterable[str]:
        """The names as given."""
        return tuple(self._tensors)

    def current(self, name: str) -> torch.Tensor:
        """The mapping's present value. Raises DeclarationError when it is gone, or the base of an unmerged adapter."""
        if name not in self._tensors:
            raise DeclarationError(f"{name}: the trainer holds no tensor of this name any more")
        if _is_adapted(name) and not self._merged:
            raise _unmerged(name)
        return self._tensors[name]

    def stacked(self, name: str) -> StackedExperts | None:  # noqa: ARG002
        """Names alone say nothing."""
        return None

    def low_rank(self, name: str) -> LowRank | None:  # noqa: ARG002
        """Names alone say nothing."""
        return None


class ModuleTensors:
    """Parameters and persistent buffers of a live module, read without `state_dict()`, whose hooks may copy."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._owners: dict[str, tuple[torch.nn.Module, str]] = {}
        self._adapters: dict[str, torch.nn.Module] = {}
        self._low_rank: dict[str, LowRank] = {}
        self._unmergeable: dict[str, str] = {}
        self.refresh()

    def refresh(self) -> None:
        """Reshard FSDP2 modules that a forward pass left whole, then walk the module tree again.

        FSDP2 swaps the parameter objects of a module while it is unsharded (the root stays so after a forward
        pass without a backward one); what a refit reads are the shards, which are the master weights.
        """
        self._owners, self._adapters, self._low_rank, self._unmergeable = {}, {}, {}, {}
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for path, module in self._module.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            if hasattr(module, "base_layer") and hasattr(module, "merged"):
                self._adapters[f"{prefix}base_layer."] = module
            buffers = [leaf for leaf in module._buffers if leaf not in module._non_persistent_buffers_set]
            for leaf in (*module._parameters, *buffers):
                if getattr(module, leaf) is not None:
                    self._owners[prefix + leaf] = (module, leaf)
            found = adapted(module, prefix)
            if isinstance(found, LowRank):
                self._low_rank[f"{prefix}weight"] = found
            elif found is not None:
                self._unmergeable |= {
                    prefix + leaf: found for leaf in module._parameters if prefix + leaf in self._owners
                }

    def names(self) -> Iterable[str]:
        """In module order: each module's parameters, then its persistent buffers. Aliases appear under all names."""
        return tuple(self._owners)

    def current(self, name: str) -> torch.Tensor:
        """What the owning module holds now.

        Raises DeclarationError when it is gone, or the base of an adapter that is not merged and cannot be.
        """
        module, leaf = self._owners.get(name, (None, ""))
        tensor = getattr(module, leaf, None)
        if not isinstance(tensor, torch.Tensor):
            raise DeclarationError(f"{name}: the trainer holds no tensor of this name any more")
        if name in self._unmergeable:
            raise DeclarationError(f"{name}: {self._unmergeable[name]}")
        if self._adapters and _is_adapted(name):
            adapter = self._adapters.get(name[: name.rindex("base_layer.") + len("base_layer.")])
            if adapter is None or not adapter.merged:
                raise _unmerged(name)
        return tensor

    def stacked(self, name: str) -> StackedExperts | None:
        """Transformers' expert modules say whether they are transposed, and whether gate and up are interleaved."""
        module, _ = self._owners[name]
        transposed = getattr(module, "is_transposed", None)
        if not isinstance(transposed, bool):
            return None
        return StackedExperts(transposed, interleaved=getattr(module, "is_concatenated", True) is False)

    def low_rank(self, name: str) -> LowRank | None:
        """LoRA layers that keep the weight's own name, as those of NeMo Automodel do."""
        return self._low_rank.get(name)


def _is_adapted(name: str) -> bool:
    """True for a weight that a LoRA layer wraps: its values are the model's only while the adapter is merged."""
    return "base_layer" in name.split(".")


def _unmerged(name: str) -> DeclarationError:
    return DeclarationError(f"{name}: its adapter is not merged, so this is not the model's weight; merge it first")
