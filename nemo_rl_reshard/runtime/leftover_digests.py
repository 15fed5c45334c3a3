"""Verification of leftovers: what trainers hold against what was assembled, and that against what is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nemo_rl_reshard.runtime.leftover_plan import LeftoverProgram, Piece
from nemo_rl_reshard.runtime.verify import DIGEST_BYTES, Verification, digest
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.protocol import Transport


class LeftoverDigests:
    """Digests of one run, noted while batches pass and compared after the last, when no collective is under way."""

    def __init__(self, picks: Callable[[str], bool]) -> None:
        self._picks = picks
        self._held: list[bytes] = []
        self._assembled: dict[int, list[tuple[str, bytes]]] = {}
        self._wholes: list[tuple[str, bytes]] = []

    def note_held(self, tensor: str, view: Tensor, dtype: torch.dtype) -> None:
        """On a trainer: a piece as its storage holds it, in the order of its pieces."""
        if self._picks(tensor):
            self._held.append(digest(view.to(dtype)))

    def note_assembled(self, tensor: str, piece: Piece, whole: Tensor) -> None:
        """On the root: a piece as it lies in the assembled tensor."""
        if self._picks(tensor):
            region = piece.region
            label = f"{tensor}: region {region.offset}+{region.extent}"
            self._assembled.setdefault(piece.rank, []).append((label, digest(whole[region.slices])))

    def note_whole(self, tensor: str, whole: Tensor) -> None:
        """On the root: a tensor as it is sent on. On a receiver: as its loader is about to get it."""
        if self._picks(tensor):
            self._wholes.append((tensor, digest(whole)))

    def note_wholes(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """`note_whole` for all tensors of a batch."""
        for tensor, whole in named:
            self.note_whole(tensor, whole)

    def compare(
        self, program: LeftoverProgram, transport: Transport, deadline: Deadline, verification: Verification
    ) -> None:
        """Meet the other ranks of `program`. Raises VerificationError listing every region that differs."""
        if transport.rank == program.root:
            for rank, assembled in self._assembled.items():
                said = list(self._held)
                if rank != program.root:
                    said = _receive(transport, rank, len(assembled), deadline)
                verification.num_compared += len(assembled)
                for (label, found), told in zip(assembled, said, strict=True):
                    if found != told:
                        verification.faults.add(f"{label} as gathered is not what trainer rank {rank} holds")
            for receiver in program.receivers:
                if receiver != program.root and self._wholes:
                    _send(transport, receiver, [found for _, found in self._wholes], deadline)
        else:
            if transport.rank in program.trainers and self._held:
                _send(transport, program.root, self._held, deadline)
            if transport.rank in program.receivers and self._wholes:
                said = _receive(transport, program.root, len(self._wholes), deadline)
                verification.num_compared += len(said)
                for (tensor, found), told in zip(self._wholes, said, strict=True):
                    if found != told:
                        verification.faults.add(f"{tensor}: as received is not what rank {program.root} sent")
        verification.faults.raise_if_any()


def _send(transport: Transport, rank: int, digests: Sequence[bytes], deadline: Deadline) -> None:
    said = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
    transport.send(said.to(transport.device), rank).wait(deadline)


def _receive(transport: Transport, rank: int, count: int, deadline: Deadline) -> list[bytes]:
    said = torch.empty(count * DIGEST_BYTES, dtype=torch.uint8, device=transport.device)
    transport.receive(said, rank).wait(deadline)
    content = said.cpu().numpy().tobytes()
    return [content[start : start + DIGEST_BYTES] for start in range(0, len(content), DIGEST_BYTES)]
