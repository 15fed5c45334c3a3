"""FaultyTransport: a transport that fails on purpose at the n-th operation its rank starts."""

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor

from nemo_rl_reshard.errors import TransportError
from nemo_rl_reshard.transport.protocol import Pending, Transport


@dataclass(frozen=True)
class Delay:
    """Start the operation `seconds` later: a slow rank, not a failing one."""

    seconds: float

    def strike(self) -> None:
        threading.Event().wait(self.seconds)


@dataclass(frozen=True)
class Raise:
    """Fail instead of starting the operation."""

    message: str

    def strike(self) -> None:
        raise TransportError(self.message)


@dataclass(frozen=True)
class Stall:
    """Do not come back until `release` is set: a rank that hangs."""

    release: threading.Event = field(default_factory=threading.Event)

    def strike(self) -> None:
        self.release.wait()


Fault = Delay | Raise | Stall


class FaultyTransport:
    """Implements `Transport` over `inner`; `faults` maps the index of an operation, counted from 0, to what strikes."""

    def __init__(self, inner: Transport, faults: Mapping[int, Fault]) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self.device = inner.device
        self.in_rounds = inner.in_rounds
        self.num_started = 0
        self._inner = inner
        self._faults = dict(faults)

    def together(self) -> AbstractContextManager[None]:
        return self._inner.together()

    def send(self, buffer: Tensor, dst: int) -> Pending:
        self._strike()
        return self._inner.send(buffer, dst)

    def receive(self, buffer: Tensor, src: int) -> Pending:
        self._strike()
        return self._inner.receive(buffer, src)

    def all_gather(self, output: Tensor, own: Tensor, ranks: tuple[int, ...]) -> Pending:
        self._strike()
        return self._inner.all_gather(output, own, ranks)

    def broadcast(self, buffer: Tensor, root: int, ranks: tuple[int, ...]) -> Pending:
        self._strike()
        return self._inner.broadcast(buffer, root, ranks)

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)

    def close(self) -> None:
        self._inner.close()

    def _strike(self) -> None:
        index = self.num_started
        self.num_started += 1
        if index in self._faults:
            self._faults[index].strike()
