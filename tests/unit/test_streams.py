"""The rule about streams, on streams that are played: after the producer, before any reader. B69."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from nemo_rl_reshard.errors import TransportTimeoutError
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.streams import StreamOrder

GPU, OTHER, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


@dataclass(eq=False)
class PlayedStream:
    """A queue of work; what waits for another stream comes after what that one holds now."""

    name: str
    done: list[str] = field(default_factory=list)
    queue: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)

    def wait_stream(self, other: PlayedStream) -> None:
        self.waits.append(other.name)
        self.queue += [f"after {work}" for work in other.queue]


class PlayedEvent:
    """Complete once the stream has done what it held when the event was recorded; every look does one piece."""

    def record(self, stream: PlayedStream) -> None:
        self._stream, self._left = stream, len(stream.queue)

    def query(self) -> bool:
        if self._left:
            self._stream.done.append(self._stream.queue.pop(0))
            self._left -= 1
        return not self._left


class PlayedCuda:
    """As much of torch.cuda as the rule uses; `apart` puts the caller on a stream of its own."""

    Event = PlayedEvent

    def __init__(self, *, apart: bool) -> None:
        self.default = {device: PlayedStream(f"default of {device}") for device in (GPU, OTHER)}
        self.current = (
            {device: PlayedStream(f"current of {device}") for device in (GPU, OTHER)} if apart else self.default
        )

    def current_stream(self, device: torch.device) -> PlayedStream:
        return self.current[device]

    def default_stream(self, device: torch.device) -> PlayedStream:
        return self.default[device]


def test_b69_the_first_copy_comes_after_what_training_has_queued():
    cuda = PlayedCuda(apart=True)
    cuda.default[GPU].queue.append("optimizer step")
    order = StreamOrder(cuda)
    order.begin()
    order.meet(GPU)
    cuda.current[GPU].queue.append("pack")
    assert cuda.current[GPU].queue == ["after optimizer step", "pack"]
    assert not cuda.current[OTHER].waits, "a device that the refit does not touch is left alone"


def test_b69_every_refit_waits_anew_and_once():
    cuda = PlayedCuda(apart=True)
    order = StreamOrder(cuda)
    for count in (1, 2):
        order.begin()
        for _ in range(3):
            order.meet(GPU)
        assert len(cuda.current[GPU].waits) == count


def test_b69_on_the_default_stream_the_order_is_there_already():
    cuda = PlayedCuda(apart=False)
    order = StreamOrder(cuda)
    order.meet(GPU)
    assert not cuda.default[GPU].waits


def test_b69_nobody_looks_before_the_copies_are_complete():
    cuda = PlayedCuda(apart=True)
    order = StreamOrder(cuda)
    order.meet(GPU)
    order.meet(OTHER)
    cuda.current[GPU].queue += ["unpack", "install"]
    cuda.current[OTHER].queue += ["unpack"]
    order.settle(Deadline.after(5.0), "installing")
    assert cuda.current[GPU].done == ["unpack", "install"]
    assert cuda.current[OTHER].done == ["unpack"]


def test_a_device_that_never_ends_is_a_timeout_that_says_what_was_waited_for():
    class Never(PlayedEvent):
        def query(self) -> bool:
            return False

    cuda = PlayedCuda(apart=False)
    cuda.Event = Never
    order = StreamOrder(cuda)
    order.meet(GPU)
    with pytest.raises(TransportTimeoutError, match=r"installing the weights passed its deadline of 0\.05 s"):
        order.settle(Deadline.after(0.05), "installing the weights")


def test_weights_on_the_cpu_need_no_cuda():
    order = StreamOrder(cuda=None)
    order.begin()
    order.meet(CPU)
    order.settle(Deadline.after(5.0), "nothing")
