"""Gather and broadcast in packed batches: how the whole model travels in the conventional refit, the baseline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_reshard.runtime.endpoint import Source, Target
from nemo_rl_reshard.runtime.leftover_digests import LeftoverDigests
from nemo_rl_reshard.runtime.leftover_plan import Batch, Gather, LeftoverProgram, Piece
from nemo_rl_reshard.runtime.report import RankReport
from nemo_rl_reshard.runtime.verify import Verification
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.protocol import Pending, Transport
from nemo_rl_reshard.transport.staging import pack, torch_dtype
from nemo_rl_reshard.transport.streams import StreamOrder

_SETS = 2
"""Buffers of each kind: one batch is gathered while the one before it is broadcast and loaded."""


@dataclass(slots=True)
class _Buffers:
    """Of one batch under way: `share` is what a trainer gives, `gathered` all shares, `whole` the tensors."""

    share: Tensor
    gathered: Tensor
    whole: Tensor


class LeftoverMover:
    """One rank's part of the leftovers, ready to run any number of times.

    All trainers start the same collectives in the same order, whatever they hold. Gathering runs among trainers,
    sending among the root and the receivers; no rank waits in one for somebody who waits in the other, because the
    root starts gathering batch i + 1 before it waits for batch i. A rank that does both starts them in the root's
    order, as its collectives may run among the very same ranks; one that only receives asks for a batch in advance.
    """

    def __init__(
        self,
        program: LeftoverProgram,
        transport: Transport,
        streams: StreamOrder,
        *,
        source: Source | None,
        target: Target | None,
    ) -> None:
        rank = transport.rank
        self._program = program
        self._transport = transport
        self._streams = streams
        self._source = source
        self._target = target
        self._is_root = rank == program.root
        self._is_trainer = rank in program.trainers
        self._is_receiver = rank in program.receivers
        self._only_receives = self._is_receiver and not self._is_trainer
        self._sending_ranks = (program.root, *(other for other in program.receivers if other != program.root))
        self._gathers_here = self._is_root or (self._is_trainer and program.gather is Gather.EVERYWHERE)
        self._sets: list[_Buffers] = []
        self._digests = LeftoverDigests(lambda _tensor: False)
        self._allocated_bytes = 0
        self._kept_bytes = 0

    @property
    def extra_bytes(self) -> int:
        """Bytes of buffers, and of those that the loader kept in the last run, at most all at once."""
        return self._allocated_bytes + self._kept_bytes

    def run(self, deadline: Deadline, report: RankReport, verification: Verification) -> None:
        """Move all batches once. Raises what transport, source and target raise."""
        batches = self._program.batches
        if not batches or not (self._is_trainer or self._is_receiver):
            return
        self._allocate()
        self._kept_bytes = 0
        self._digests = LeftoverDigests(verification.picks)
        gathering: list[Pending] = self._start_gather(0, deadline, report)
        sending: list[list[Pending]] = [[] for _ in range(_SETS)]
        if self._only_receives:
            sending[0] = self._start_broadcast(0, report)
        for index, batch in enumerate(batches):
            turn = index % _SETS
            following: list[Pending] = []
            if index + 1 < len(batches):
                following = self._start_gather(index + 1, deadline, report)
            if self._is_receiver and not self._is_root and not self._only_receives:
                sending[turn] = self._start_broadcast(index, report)
            _wait(gathering, deadline)
            gathering = following
            if self._is_root:
                _wait(sending[turn], deadline)  # of the batch that lay in this set before
                self._assemble(batch, self._sets[turn])
                sending[turn] = self._start_broadcast(index, report)
            if self._is_receiver:
                if index + 1 < len(batches) and self._only_receives:
                    sending[(index + 1) % _SETS] = self._start_broadcast(index + 1, report)
                _wait(sending[turn], deadline)
                self._load(batch, turn, deadline)
        for pending in sending:
            _wait(pending, deadline)
        if self._transport.device.type != "cpu":
            # Memory of a GPU is the engine's between refits, and cheap to take again; fresh pages of a host are not.
            self._sets.clear()

    def compare(self, deadline: Deadline, verification: Verification) -> None:
        """Compare the digests of the last run. Raises VerificationError listing every region that differs."""
        self._digests.compare(self._program, self._transport, deadline, verification)

    def _allocate(self) -> None:
        """Buffers, unless there are. In each set its largest batch decides: one large tensor enlarges one set."""
        if self._sets:
            return
        self._allocated_bytes = 0
        num_trainers = len(self._program.trainers)
        for turn in range(min(_SETS, len(self._program.batches))):
            batches = self._program.batches[turn::_SETS]
            share = max(batch.share_nbytes for batch in batches)
            whole = max(batch.nbytes for batch in batches)
            sizes = (
                share if self._is_trainer else 0,
                share * num_trainers if self._gathers_here and num_trainers > 1 else 0,
                whole if self._is_root or self._is_receiver else 0,
            )
            self._sets.append(_Buffers(*(self._buffer(size) for size in sizes)))
            self._allocated_bytes += sum(sizes)

    def _buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._transport.device)

    def _start_gather(self, index: int, deadline: Deadline, report: RankReport) -> list[Pending]:
        """Pack this trainer's share of a batch and start bringing the shares together."""
        if not self._is_trainer:
            return []
        batch, buffers = self._program.batches[index], self._sets[index % _SETS]
        own = buffers.share[: batch.share_nbytes]
        for piece in self._own_pieces(batch):
            assert self._source is not None
            spec = batch.specs[piece.place]
            view = self._source.view(spec.name, piece.region).detach()
            self._streams.meet(view.device)
            nbytes = piece.region.numel * spec.item_size
            pack(view, own[piece.share_offset : piece.share_offset + nbytes], torch_dtype(spec.dtype))
            self._digests.note_held(spec.name, view, torch_dtype(spec.dtype))
        if self._transport.device.type == "cpu":
            self._streams.settle(deadline, f"copying {batch.share_nbytes} bytes of leftovers")  # the host sends them
        trainers = self._program.trainers
        others = len(trainers) - 1
        if not others:
            return []
        size = batch.share_nbytes
        if self._program.gather is Gather.EVERYWHERE:
            report.leftover_bytes_sent += size
            report.leftover_bytes_received += size * others
            output = buffers.gathered[: size * len(trainers)]
            return [self._transport.all_gather(output, own, trainers)]
        if not self._is_root:
            report.leftover_bytes_sent += size
            return [self._transport.send(own, self._program.root)]
        report.leftover_bytes_received += size * others
        with self._transport.together():
            return [
                self._transport.receive(buffers.gathered[place * size : (place + 1) * size], rank)
                for place, rank in enumerate(trainers)
                if rank != self._program.root
            ]

    def _assemble(self, batch: Batch, buffers: _Buffers) -> None:
        """On the root: put the pieces of all shares together to whole tensors."""
        trainers = self._program.trainers
        for piece in batch.pieces:
            spec = batch.specs[piece.place]
            nbytes = piece.region.numel * spec.item_size
            share = buffers.share
            if piece.rank != self._program.root:
                place = trainers.index(piece.rank) * batch.share_nbytes
                share = buffers.gathered[place : place + batch.share_nbytes]
            packed = share[piece.share_offset : piece.share_offset + nbytes].view(torch_dtype(spec.dtype))
            whole = _tensor_in(buffers.whole, batch, piece.place)
            whole[piece.region.slices].copy_(packed.view(piece.region.extent))
            self._digests.note_assembled(spec.name, piece, whole)
        for index, spec in enumerate(batch.specs):
            self._digests.note_whole(spec.name, _tensor_in(buffers.whole, batch, index))

    def _start_broadcast(self, index: int, report: RankReport) -> list[Pending]:
        """Send a batch on from the root, or post its arrival at a receiver."""
        batch, buffers = self._program.batches[index], self._sets[index % _SETS]
        if self._sending_ranks == (self._program.root,):
            return []
        if self._is_root:
            report.leftover_bytes_sent += batch.nbytes
        else:
            report.leftover_bytes_received += batch.nbytes
        buffer = buffers.whole[: batch.nbytes]
        return [self._transport.broadcast(buffer, self._program.root, self._sending_ranks)]

    def _load(self, batch: Batch, turn: int, deadline: Deadline) -> None:
        """Hand one batch to the engine's loader; a buffer that it keeps a reference to becomes its own."""
        assert self._target is not None
        named = [(spec.name, _tensor_in(self._sets[turn].whole, batch, i)) for i, spec in enumerate(batch.specs)]
        if not self._is_root:
            self._digests.note_wholes(named)
        self._target.load(named)
        named.clear()
        if self._transport.device.type == "cpu":
            self._streams.settle(deadline, f"loading {batch.nbytes} bytes of leftovers")  # the host writes there next
        if _is_shared(self._sets[turn].whole):
            self._kept_bytes += self._sets[turn].whole.numel()
            self._sets[turn].whole = torch.empty_like(self._sets[turn].whole)

    def _own_pieces(self, batch: Batch) -> Iterator[Piece]:
        return (piece for piece in batch.pieces if piece.rank == self._transport.rank)


def _tensor_in(buffer: Tensor, batch: Batch, index: int) -> Tensor:
    """Tensor `index` of a batch whose bytes lie in `buffer`, as a view."""
    spec, start = batch.specs[index], batch.offsets[index]
    return buffer[start : start + spec.nbytes].view(torch_dtype(spec.dtype)).view(spec.shape)


def _is_shared(buffer: Tensor) -> bool:
    """Whether anyone beside us still holds a view of `buffer`'s storage."""
    storage = buffer.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


def _wait(pending: list[Pending], deadline: Deadline) -> None:
    for operation in pending:
        operation.wait(deadline)
    pending.clear()
