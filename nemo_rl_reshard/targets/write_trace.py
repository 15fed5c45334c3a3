"""WriteTrace: watches a weight loader run on placeholders and notes every write into a parameter; moves no byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl_reshard.errors import TargetError
from nemo_rl_reshard.targets.trace_geometry import Strided, through_copy

_aten = torch.ops.aten
_ELEMENTWISE_COPIES = (_aten._to_copy.default, _aten.clone.default)
_FILLS = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default)
_FINAL_REASONS = ("it is computed", "it is concatenated", "it is assembled")
_JOINS = ("aten.cat", "aten.stack", "aten.concat")


@dataclass(frozen=True, slots=True)
class CopyRecord:
    """A view of checkpoint tensor `tensor` was copied into a view of parameter `storage`."""

    tensor: str
    source: Strided
    storage: str
    target: Strided


@dataclass(frozen=True, slots=True)
class FillRecord:
    """A view of parameter `storage` was set to `value`: padding."""

    storage: str
    target: Strided
    value: float


@dataclass(frozen=True, slots=True)
class ComputedRecord:
    """Parameter `storage` was written with something that is not a plain copy.

    It was made from checkpoint tensors `tensors` and from what parameters `storages` held.
    """

    storage: str
    tensors: frozenset[str]
    storages: frozenset[str]
    reason: str


@dataclass(frozen=True, slots=True)
class _Derived:
    """What a temporary tensor of the loader is made of: checkpoint tensors, parameters."""

    reason: str = ""
    tensors: frozenset[str] = frozenset()
    storages: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Copied:
    """A temporary that holds an element-wise copy of a view of one checkpoint tensor."""

    tensor: str
    origin: Strided
    own: Strided


@dataclass(slots=True)
class Writes:
    """Everything one run of the loader wrote, in order of kind."""

    copies: list[CopyRecord] = field(default_factory=list)
    fills: list[FillRecord] = field(default_factory=list)
    computed: list[ComputedRecord] = field(default_factory=list)

    def joined(self, other: Writes) -> Writes:
        """Both, this one first."""
        return Writes(self.copies + other.copies, self.fills + other.fills, self.computed + other.computed)


def geometry(tensor: torch.Tensor) -> Strided:
    """The tensor's place in its storage."""
    return Strided(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the tensor's storage, equal for all its views; valid while one of them lives."""
    return int(tensor.untyped_storage()._cdata)


class WriteTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Run a loader under this mode; `writes` then says what it did.

    `placeholders` are the checkpoint tensors by name, on the meta device; asked for its value as a number, one says 1.
    `destinations` are the parameters and buffers by name. No operation that writes into a destination is carried out,
    so a destination may also be a live tensor.
    """

    def __init__(self, placeholders: Mapping[str, torch.Tensor], destinations: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes = Writes()
        self._names = {storage_key(tensor): name for name, tensor in placeholders.items()}
        self._destinations = {storage_key(tensor): (name, tensor) for name, tensor in destinations.items()}
        self._copied: dict[int, _Copied] = {}
        self._derived: dict[int, _Derived] = {}
        self._kept: list[torch.Tensor] = []  # a freed storage's identity could come back for another tensor
        self._scalar: _Derived | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note what `func` reads and writes, and carry it out unless it writes into a destination."""
        kwargs = dict(kwargs or {})
        if func is _aten._local_scalar_dense.default and args[0].is_meta and self._known(args[0]):
            self._scalar = self._made_of(args[0])
            return 1.0 if args[0].is_floating_point() else 1
        written = written_argument(func, args, kwargs)
        if written is not None and storage_key(written) in self._destinations:
            self._note_write(func, written, args, kwargs)
            return written
        if func is _aten.copy_.default and self._known(args[1]):
            return self._copy_to_temporary(args[0], args[1])
        if func is _aten._to_copy.default and args[0].is_meta and "device" in kwargs:
            kwargs["device"] = torch.device("meta")  # a placeholder has no bytes to move to a device
        result = func(*args, **kwargs)
        self._follow(func, args, kwargs, result, written)
        return result

    def _note_write(self, func: Any, written: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not written.numel():
            return  # a rank whose part is nothing but padding: it needs nothing of the tensor
        name, base = self._destinations[storage_key(written)]
        where = geometry(written)
        target = Strided(where.offset - int(base.storage_offset()), where.size, where.stride)
        if func in _FILLS and not any(self._known(tensor) for tensor in _tensors(args[1:], kwargs)):
            if self._scalar is None:
                value = 0.0 if func is _aten.zero_.default else float(args[1])
                self.writes.fills.append(FillRecord(name, target, value))
            else:
                made, self._scalar = self._scalar, None
                reason = "it passes through a Python number"
                self.writes.computed.append(ComputedRecord(name, made.tensors, made.storages, reason))
            return
        if func is _aten.copy_.default:
            found = self._origin(args[1])
            if found is not None:
                self.writes.copies.append(CopyRecord(found[0], found[1], name, target))
                self._kept.append(args[1])
                return
            made = self._made_of(args[1])
            if not made.tensors and not made.storages:
                self.writes.fills.append(FillRecord(name, target, _constant(args[1], name)))
                return
        else:
            made = self._merge(func, _tensors(args, kwargs))
        self.writes.computed.append(ComputedRecord(name, made.tensors, made.storages, made.reason))

    def _copy_to_temporary(self, temporary: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        found, key = self._origin(source), storage_key(temporary)
        whole = temporary.numel() * temporary.element_size() == temporary.untyped_storage().nbytes()
        if found is not None and whole and temporary.shape == source.shape and key not in self._derived:
            self._copied[key] = _Copied(found[0], found[1], geometry(temporary))
        else:
            made, before = self._made_of(source), self._made_of(temporary)
            self._derived[key] = _Derived(
                "it is assembled by the loader", made.tensors | before.tensors, made.storages | before.storages
            )
            self._copied.pop(key, None)
        self._kept.append(temporary)
        return temporary

    def _follow(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, written: torch.Tensor | None
    ) -> None:
        sources = [tensor for tensor in _tensors(args, kwargs) if self._known(tensor)]
        if not sources:
            return
        for made in _tensors((result,), {}):
            key = storage_key(made)
            if self._known(made) and made is not written:
                continue  # a view
            found = self._origin(sources[0]) if func in _ELEMENTWISE_COPIES else None
            if found is not None:
                self._copied[key] = _Copied(found[0], found[1], geometry(made))
            else:
                self._copied.pop(key, None)
                self._derived[key] = self._merge(func, sources)
            self._kept.append(made)

    def _known(self, tensor: torch.Tensor) -> bool:
        key = storage_key(tensor)
        return key in self._names or key in self._copied or key in self._derived or key in self._destinations

    def _origin(self, tensor: torch.Tensor) -> tuple[str, Strided] | None:
        """(checkpoint tensor, view of it) when `tensor` holds exactly that view's elements."""
        key = storage_key(tensor)
        if key in self._derived:
            return None  # a checkpoint tensor too, once the loader has changed it in place
        copied = self._copied.get(key)
        if copied is None:
            return (self._names[key], geometry(tensor)) if key in self._names else None
        view = through_copy(copied.origin, copied.own, geometry(tensor))
        return None if view is None else (copied.tensor, view)

    def _made_of(self, tensor: torch.Tensor) -> _Derived:
        key = storage_key(tensor)
        if key in self._derived:
            return self._derived[key]
        if key in self._copied:
            return _Derived("it is reshaped by the loader", tensors=frozenset({self._copied[key].tensor}))
        if key in self._names:
            return _Derived("it is not copied as one box", tensors=frozenset({self._names[key]}))
        if key in self._destinations:
            return _Derived("it is transformed in place", storages=frozenset({self._destinations[key][0]}))
        return _Derived()

    def _merge(self, func: Any, tensors: list[torch.Tensor]) -> _Derived:
        made = [self._made_of(tensor) for tensor in tensors]
        name = str(func)
        joined = name.startswith(_JOINS)
        reason = "it is concatenated by the loader" if joined else f"it is computed by the loader ({name})"
        return _Derived(
            next((part.reason for part in made if part.reason.startswith(_FINAL_REASONS)), reason),
            frozenset().union(*(part.tensors for part in made)),
            frozenset().union(*(part.storages for part in made)),
        )


def _constant(tensor: torch.Tensor, storage: str) -> float:
    """The one value of a tensor that no checkpoint tensor went into. Raises TargetError if there is no such value."""
    first = None if tensor.is_meta or not tensor.numel() else tensor.flatten()[0]
    if first is None or not bool((tensor == first).all()):
        raise TargetError(f"parameter {storage} is written with values that come from no checkpoint tensor")
    return float(first.item())


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(part for part in value if isinstance(part, torch.Tensor))
    return found


def written_argument(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor that `func` writes in place, by its schema, or None."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if isinstance(value, torch.Tensor):
            return value
    return None
