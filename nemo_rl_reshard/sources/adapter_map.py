"""What a model's live state-dict adapter makes of each training tensor, proven to be boxes of it where it is.

NeMo RL sends what `model.state_dict_adapter.convert_single_tensor_to_hf` makes of the *gathered* tensor. What it makes
is learnt from the adapter itself, never from tables of ours that could differ from it. It is run twice on stand-ins for
the gathered tensor, both of its real shape and dtype and neither with any memory worth naming:

1. A contiguous tensor on the meta device. It has strides and offsets and no values, so every view of it tells exactly
   which elements it shows: the strides are the index code. Copies are intercepted (`ViewTrace`) and stay views. A
   result in the tensor's own memory, of its dtype, went through views and copies alone: no arithmetic. Its offset and
   strides are then read as a box with its dims in some order, or not at all.
2. One zero on the CPU, expanded to the shape. An adapter that treats meta tensors apart, or looks at values, cannot
   behave alike in both runs: names, shapes and the list of views taken must be equal. Here any operation that is no
   view or copy ends the proof before it runs.

An adapter never sees a DTensor here, of which it might convert the local part only. What is not proven is `Unproven`,
with the reason: its values come from the adapter and the gathered tensor, on the leftover route.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from nemo_rl_reshard.errors import DeclarationError
from nemo_rl_reshard.sources.naming import Piece
from nemo_rl_reshard.sources.view_trace import NotAViewError, ViewTrace, box_of

_EXCLUDED = r".*_extra_state.*"
_SMALL_ELEMENTS = 1 << 22
"""A tensor of at most so many elements may be made in full to see what an adapter returns that needs values."""


@dataclass(frozen=True, slots=True)
class Unproven:
    """A checkpoint tensor that the adapter makes, and that is no box of the training tensor for the `reason` given."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    reason: str


class AdapterMap:
    """Learns from `adapter`, a model's `state_dict_adapter`. Raises DeclarationError if that has no such method."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._kind = type(adapter).__name__
        if not callable(getattr(adapter, "convert_single_tensor_to_hf", None)):
            raise DeclarationError(
                f"{self._kind} converts no single tensor (convert_single_tensor_to_hf), which a refit needs; load the "
                "Hugging Face model instead (policy.dtensor_cfg.automodel_kwargs.force_hf: true)"
            )

    def export(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """What NeMo RL would send of the whole training tensor `name`, before the cast to the engine's dtype."""
        with torch.no_grad():
            made = self._adapter.convert_single_tensor_to_hf(
                name, tensor, exclude_key_regex=_EXCLUDED, quantization=False
            )
        return list(made)

    def learn(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Piece | Unproven, ...]:
        """What the adapter makes of the training tensor `name` of global `shape`; nothing where it drops the tensor.

        Raises DeclarationError where its results cannot even be named without the values of a large tensor.
        """
        whole = torch.empty(shape, dtype=dtype, device="meta")
        trace = ViewTrace(whole, strict=False)
        try:
            with trace:
                made = self.export(name, whole)
            doubt = self._doubt(name, shape, dtype, trace.operations, made)
        except Exception as error:  # whatever the adapter raises when it is given no values
            doubt = f"{self._kind}: {error}"
            if not isinstance(error, NotAViewError):
                doubt = f"{self._kind} needs the values of the tensor: {type(error).__name__}: {error}".splitlines()[0]
            made = self._untraced(name, shape, dtype)
        return tuple(self._proven(key, value, shape, dtype, trace, doubt) for key, value in made)

    def _proven(
        self, key: str, value: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, trace: ViewTrace, doubt: str
    ) -> Piece | Unproven:
        reason = doubt
        if not reason and not trace.shares(value):
            reason = f"{self._kind} computes it"
        if not reason:
            try:
                return Piece(key, *box_of(value, shape))
            except ValueError as fault:
                reason = f"{self._kind} makes it of parts that are no box: {fault}"
        if dtype.is_floating_point and not value.dtype.is_floating_point:
            raise DeclarationError(
                f"{key}: {self._kind} makes it {value.dtype} of {dtype} weights; a refit sends no packed integers"
            )
        return Unproven(key, tuple(value.shape), value.dtype, reason)

    def _doubt(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        operations: Sequence[str],
        made: Sequence[tuple[str, torch.Tensor]],
    ) -> str:
        """Why the run on the meta device proves nothing; empty if a run on a CPU tensor does the very same."""
        stand_in = torch.zeros((), dtype=dtype).expand(shape)
        trace = ViewTrace(stand_in, strict=True)
        try:
            with trace:
                again = self.export(name, stand_in)
        except NotAViewError as fault:
            return f"{self._kind}: {fault}"
        except Exception as error:
            return f"{self._kind} raises {type(error).__name__} where it did not on a tensor without values"
        alike = [(key, value.shape, value.dtype) for key, value in made] == [
            (key, value.shape, value.dtype) for key, value in again
        ]
        return "" if alike and trace.operations == list(operations) else f"{self._kind} treats meta tensors apart"

    def _untraced(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
        """Names and shapes of the results, with the adapter left alone."""
        try:
            return self.export(name, torch.empty(shape, dtype=dtype, device="meta"))
        except Exception as error:
            if prod(shape) <= _SMALL_ELEMENTS:
                return self.export(name, torch.zeros(shape, dtype=dtype))
            raise DeclarationError(
                f"{name} {shape}: {self._kind} cannot say what it makes of it without its values "
                f"({type(error).__name__}: {error})"
            ) from error
