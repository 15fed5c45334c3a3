"""Canonical names: which checkpoint tensors one training tensor holds, as boxes of it that need no copy.

Canonical names are those that the engine's loader accepts: routed experts one by one. A mapping is plain values
(`Rule`, `Piece`), so that it can be printed, compared and proven; only pieces that are pure slices, perhaps with
their dims in another order, may travel directly.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from nemo_rl_reshard.errors import DeclarationError
from nemo_rl_reshard.layout import Region

if TYPE_CHECKING:
    import torch


class Form(StrEnum):
    """How a checkpoint tensor follows from the training tensor of the same place in the model."""

    SLICE = "slice"
    TRANSPOSED = "transposed"  # last two dims swapped: a change of strides
    COMPUTED = "computed"  # values differ, for example a norm stored around zero


@dataclass(frozen=True, slots=True)
class Rule:
    """What holds for training tensors whose plain name matches `pattern` in full.

    A `reason` keeps the tensor off the direct route. COMPUTED needs a reason, and `export`: an elementwise function
    that returns a new tensor of the same shape. Without `export` the tensor is refused by name.
    """

    pattern: str
    form: Form
    reason: str = ""
    export: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.form is Form.COMPUTED and not self.reason:
            raise DeclarationError(f"rule {self.pattern!r}: a computed tensor needs the reason why it is no slice")


@dataclass(frozen=True, slots=True)
class Piece:
    """Checkpoint tensor `name` is `box` of the training tensor; its dims are the box's `dims`, in that order.

    Dims left out have extent 1 in the box. `indirect` says why the piece may not travel directly, if it may not.
    """

    name: str
    box: Region
    dims: tuple[int, ...]
    indirect: str = ""
    export: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint tensor."""
        return tuple(self.box.extent[dim] for dim in self.dims)

    def stored_region(self, region: Region) -> Region:
        """`region` of the checkpoint tensor in the coordinates of the training tensor. Inverse of `region_of`."""
        offset, extent = list(self.box.offset), list(self.box.extent)
        for dim, start, size in zip(self.dims, region.offset, region.extent, strict=True):
            offset[dim], extent[dim] = self.box.offset[dim] + start, size
        return Region(tuple(offset), tuple(extent))

    def region_of(self, part: Region) -> Region:
        """`part` of the training tensor, inside `box`, in the coordinates of the checkpoint tensor."""
        inner = part.relative_to(self.box)
        return Region(tuple(inner.offset[dim] for dim in self.dims), tuple(inner.extent[dim] for dim in self.dims))


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """How experts are stacked in one tensor: [E, out, in], or [E, in, out] when `transposed` (None: not declared).

    `interleaved`: rows of gate and up alternate instead of all gate rows coming first.
    """

    transposed: bool | None = None
    interleaved: bool = False


_STACKED = re.compile(r"^(?P<path>.*\bexperts)\.(?P<leaf>gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight)?$")
_STACKED_BIAS = re.compile(r"^.*\bexperts\.(?:gate_up_proj|gate_proj|up_proj|down_proj)(?:_bias|\.bias)$")
_INTERLEAVED_ARCHITECTURES = frozenset({"GptOssForCausalLM"})


@dataclass(frozen=True, slots=True)
class Naming:
    """The mapping of one model family. Sizes are those of the configuration; None when it does not say.

    `rules` come first, the first match wins; then stacked experts; any other tensor is a checkpoint tensor as it is.
    `renames` are (pattern, replacement) pairs applied to the finished names, in order.
    """

    architecture: str | None = None
    hidden_size: int | None = None
    expert_size: int | None = None
    stacked: StackedExperts = StackedExperts()
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    rules: tuple[Rule, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_config(cls, config: Any, architecture: str | None = None, **fields: Any) -> Naming:
        """Read sizes from a transformers-like configuration; those of its text part where it has one."""
        text = getattr(config, "text_config", None) or config
        sizes = [getattr(text, key, None) for key in ("hidden_size", "moe_intermediate_size", "intermediate_size")]
        hidden, expert, dense = (size if isinstance(size, int) else None for size in sizes)
        declared = getattr(config, "architectures", None) or [None]
        return cls(declared[0] or architecture, hidden, expert or dense, **fields)

    def pieces(self, name: str, shape: tuple[int, ...], stacked: StackedExperts | None = None) -> tuple[Piece, ...]:
        """Checkpoint tensors that the training tensor `name` (plain, see `wrapping`) of global `shape` holds.

        `stacked` is what the live module says of its own experts. Raises DeclarationError where a correct mapping
        cannot be proven.
        """
        found = self._unnamed(name, tuple(shape), stacked or self.stacked)
        return tuple(
            Piece(self._renamed(piece.name), piece.box, piece.dims, piece.indirect, piece.export) for piece in found
        )

    def taken_whole(self, name: str, shape: tuple[int, ...], stacked: StackedExperts | None = None) -> str:
        """Why the engine's loader must be given the stacked expert tensor `name` whole; empty if it need not."""
        interleaved = (stacked or self.stacked).interleaved or self.architecture in _INTERLEAVED_ARCHITECTURES
        if interleaved and len(shape) in (2, 3) and (_STACKED.match(name) or _STACKED_BIAS.match(name)):
            return "gate and up rows alternate: the engine's loader takes the experts whole"
        if not interleaved and len(shape) == 2 and _STACKED_BIAS.match(name):
            return "biases of stacked experts: the engine's loader takes them whole"
        return ""

    def _renamed(self, name: str) -> str:
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def _unnamed(self, name: str, shape: tuple[int, ...], stacked: StackedExperts) -> tuple[Piece, ...]:
        rule = next((rule for rule in self.rules if re.fullmatch(rule.pattern, name)), None)
        if rule is not None:
            return (_by_rule(name, shape, rule),)
        reason = self.taken_whole(name, shape, stacked)
        if reason:
            return (_whole(name, shape, reason),)
        match = _STACKED.match(name)
        if match is None or len(shape) != 3:
            return (_whole(name, shape),)
        return self._experts(name, shape, match["path"], match["leaf"], stacked.transposed)

    def _experts(
        self, name: str, shape: tuple[int, ...], path: str, leaf: str, declared: bool | None
    ) -> tuple[Piece, ...]:
        """One piece per expert and projection of a stacked tensor."""
        gate, up, down = self.expert_names
        halves = {"gate_up_proj": (gate, up), "gate_proj": (gate,), "up_proj": (up,), "down_proj": (down,)}[leaf]
        transposed = declared if declared is not None else self._is_transposed(name, shape, leaf)
        self._check_sizes(name, shape, leaf, transposed)
        out_dim, in_dim = (2, 1) if transposed else (1, 2)
        size, rest = divmod(shape[out_dim], len(halves))
        if rest:
            raise DeclarationError(f"{name}: {shape[out_dim]} rows are not gate and up of equal size")
        pieces = []
        for expert in range(shape[0]):
            for half, projection in enumerate(halves):
                offset, extent = [expert, 0, 0], [1, *shape[1:]]
                offset[out_dim], extent[out_dim] = half * size, size
                box = Region(tuple(offset), tuple(extent))
                pieces.append(Piece(f"{path}.{expert}.{projection}.weight", box, (out_dim, in_dim)))
        return tuple(pieces)

    def _sizes(self, leaf: str) -> tuple[int, int] | None:
        """(out, in) of one expert's `leaf` by the configuration, or None when it does not say."""
        if self.hidden_size is None or self.expert_size is None:
            return None
        if leaf == "down_proj":
            return self.hidden_size, self.expert_size
        return (2 if leaf == "gate_up_proj" else 1) * self.expert_size, self.hidden_size

    def _is_transposed(self, name: str, shape: tuple[int, ...], leaf: str) -> bool:
        """Orientation from the configuration, where it decides. Raises DeclarationError where it does not."""
        sizes = self._sizes(leaf)
        fix = "declare it (StackedExperts(transposed=...))"
        if sizes is None:
            raise DeclarationError(f"{name} {shape}: no sizes known to tell [E, out, in] from [E, in, out]; {fix}")
        if sizes[0] == sizes[1]:
            raise DeclarationError(f"{name} {shape}: both orientations of {sizes} have this shape; {fix}")
        return shape[1:] == (sizes[1], sizes[0])

    def _check_sizes(self, name: str, shape: tuple[int, ...], leaf: str, transposed: bool) -> None:
        sizes = self._sizes(leaf)
        if sizes is None:
            return
        expected = (sizes[1], sizes[0]) if transposed else sizes
        if shape[1:] != expected:
            raise DeclarationError(
                f"{name} has shape {shape}; hidden size {self.hidden_size} and expert size {self.expert_size} make it "
                f"{(shape[0], *expected)}"
            )


def _whole(name: str, shape: tuple[int, ...], indirect: str = "") -> Piece:
    return Piece(name, Region.whole(shape), tuple(range(len(shape))), indirect)


def _by_rule(name: str, shape: tuple[int, ...], rule: Rule) -> Piece:
    dims = tuple(range(len(shape)))
    if rule.form is Form.TRANSPOSED:
        if len(shape) < 2:
            raise DeclarationError(f"{name} {shape}: rule {rule.pattern!r} transposes, which needs two dims")
        dims = (*dims[:-2], dims[-1], dims[-2])
    if rule.form is Form.COMPUTED and rule.export is None:
        raise DeclarationError(
            f"{name}: its checkpoint value is computed ({rule.reason}); give rule {rule.pattern!r} an export"
        )
    return Piece(name, Region.whole(shape), dims, rule.reason, rule.export)
