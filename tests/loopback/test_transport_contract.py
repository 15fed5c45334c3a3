"""What every transport promises, run alike on loopback and on gloo with threads as ranks."""

import threading
import time

import pytest
import torch
from equipment.all_to_all import exchange
from equipment.faulty_transport import Delay, FaultyTransport, Raise, Stall
from equipment.thread_worlds import gloo_world, in_world, loopback_world, run_ranks

from nemo_rl_reshard.errors import RefitAbortedError, TransportError, TransportTimeoutError
from nemo_rl_reshard.transport.deadline import Deadline

WORLDS = pytest.mark.parametrize("world", [loopback_world, gloo_world])
LONG_S = 20.0
SHORT_S = 0.3


@WORLDS
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_messages_of_a_pair_arrive_in_order_and_whole(world, size):
    def uneven(src, dst, number):
        return (src + 2 * dst + 3 * number) % 11  # some messages are empty

    with world(size) as transports:
        for _ in range(2):
            assert in_world(transports, lambda rank: exchange(rank, uneven, 40, LONG_S)) == [True] * size


@WORLDS
def test_a_message_far_larger_than_any_socket_buffer(world):
    with world(2) as transports:
        assert in_world(transports, lambda rank: exchange(rank, lambda *_: (48 << 20) + 3, 1, LONG_S)) == [True] * 2


@WORLDS
def test_collectives_over_all_ranks_and_over_subsets_in_the_order_given(world):
    def body(transport):
        rank, deadline = transport.rank, Deadline.after(LONG_S)
        own = torch.full((3,), rank + 1, dtype=torch.uint8)
        results = {}
        for ranks in [(0, 1, 2), (2, 0), (1,), (0, 2)]:
            for turn in range(2):
                if rank in ranks:
                    output = torch.zeros(3 * len(ranks), dtype=torch.uint8)
                    transport.all_gather(output, own + 10 * turn, ranks).wait(deadline)
                    results["gather", ranks, turn] = output[::3].tolist()
                    buffer = own + 50 * turn
                    transport.broadcast(buffer, ranks[-1], ranks).wait(deadline)
                    results["broadcast", ranks, turn] = buffer.tolist()
        return results

    with world(3) as transports:
        for rank, results in enumerate(in_world(transports, body)):
            for ranks in [(0, 1, 2), (2, 0), (1,), (0, 2)]:
                for turn in range(2):
                    if rank in ranks:
                        assert results["gather", ranks, turn] == [member + 1 + 10 * turn for member in ranks]
                        assert results["broadcast", ranks, turn] == [ranks[-1] + 1 + 50 * turn] * 3
                    else:
                        assert ("gather", ranks, turn) not in results


@WORLDS
def test_many_collectives_in_flight(world):
    def body(transport):
        outputs = [torch.zeros(3, dtype=torch.uint8) for _ in range(12)]
        owns = [torch.tensor([transport.rank * 20 + turn], dtype=torch.uint8) for turn in range(12)]
        pending = [transport.all_gather(out, own, (0, 1, 2)) for out, own in zip(outputs, owns, strict=True)]
        for one in pending:
            one.wait(Deadline.after(LONG_S))
        return torch.stack(outputs).tolist()

    with world(3) as transports:
        expected = [[turn, 20 + turn, 40 + turn] for turn in range(12)]
        assert in_world(transports, body) == [expected] * 3


@WORLDS
def test_a_rank_whose_peer_stalls_times_out_naming_it_and_the_others_are_called_off(world):
    stall = Stall()

    def body(transport):
        buffer = torch.zeros(4, dtype=torch.uint8)
        if transport.rank == 2:
            faulty = FaultyTransport(transport, {0: stall})
            faulty.receive(buffer, 0).wait(Deadline.after(LONG_S))
        elif transport.rank == 0:
            try:
                transport.receive(buffer, 2).wait(Deadline.after(SHORT_S))
            finally:
                stall.release.set()
        else:
            transport.receive(buffer, 0).wait(Deadline.after(LONG_S))

    with world(3) as transports:
        start = time.monotonic()
        waited, called_off, stalled = in_world(transports, body)
        assert time.monotonic() - start < SHORT_S + 2
        assert isinstance(waited, TransportTimeoutError)
        assert str(waited) == "rank 0: receive from rank 2 passed its deadline of 0.3 s"
        for outcome in (called_off, stalled):
            assert isinstance(outcome, RefitAbortedError)
            assert str(outcome) == str(waited)


@WORLDS
def test_a_late_rank_is_waited_for(world):
    def body(transport):
        slow = FaultyTransport(transport, {0: Delay(SHORT_S)}) if transport.rank else transport
        return exchange(slow, lambda *_: 5, 2, LONG_S)

    with world(2) as transports:
        assert in_world(transports, body) == [True, True]


@WORLDS
@pytest.mark.parametrize("blocked_in", ["receive", "all_gather", "broadcast"])
def test_abort_wakes_every_blocked_rank_within_a_second(world, blocked_in):
    blocked = threading.Barrier(3)

    def start(transport):
        buffer = torch.zeros(4, dtype=torch.uint8)
        if blocked_in == "receive":
            return transport.receive(buffer, 0)
        if blocked_in == "all_gather":
            return transport.all_gather(torch.zeros(12, dtype=torch.uint8), buffer, (0, 1, 2))
        return transport.broadcast(buffer, 0, (0, 1, 2))

    def body(transport):
        if transport.rank == 0:
            blocked.wait(LONG_S)
            transport.abort("the engine of rank 0 is gone")
            start_s = time.monotonic()
            with pytest.raises(RefitAbortedError, match=r"^the engine of rank 0 is gone$"):
                transport.send(torch.zeros(4, dtype=torch.uint8), 1)
            return start_s
        pending = start(transport)
        blocked.wait(LONG_S)
        for _ in range(2):  # a wait that failed fails again, with the same cause
            with pytest.raises(RefitAbortedError, match=r"^the engine of rank 0 is gone$"):
                pending.wait(Deadline.after(LONG_S))
        return time.monotonic()

    with world(3) as transports:
        aborted_s, *woken_s = in_world(transports, body)
        assert all(woken - aborted_s < 1 for woken in woken_s), woken_s


@WORLDS
def test_the_first_reason_wins(world):
    with world(2) as transports:
        transports[0].abort("first")
        transports[1].abort("second")
        for transport in transports:
            with pytest.raises(RefitAbortedError, match=r"^first$"):
                transport.receive(torch.zeros(1, dtype=torch.uint8), 1 - transport.rank).wait(Deadline.after(LONG_S))


@WORLDS
def test_a_rank_that_raises_and_aborts_is_named_on_the_others(world):
    def body(transport):
        faulty = FaultyTransport(transport, {3: Raise("rank 1: disk on fire")} if transport.rank == 1 else {})
        try:
            return exchange(faulty, lambda *_: 9, 4, LONG_S)
        except TransportError as fault:
            transport.abort(str(fault))
            raise

    with world(3) as transports:
        for rank, outcome in enumerate(in_world(transports, body)):
            assert str(outcome) == "rank 1: disk on fire"
            assert isinstance(outcome, RefitAbortedError) == (rank != 1)


@WORLDS
def test_a_peer_that_closes_is_an_error_for_whoever_waits_for_it(world):
    def body(transport):
        if transport.rank == 1:
            transport.close()
            transport.close()
            with pytest.raises(TransportError, match="closed"):
                transport.send(torch.zeros(1, dtype=torch.uint8), 0)
        else:
            transport.receive(torch.zeros(1, dtype=torch.uint8), 1).wait(Deadline.after(LONG_S))

    with world(2) as transports:
        waited, closed = in_world(transports, body)
        assert closed is None
        assert isinstance(waited, TransportError)
        assert "rank 0: receive from rank 1" in str(waited)


@WORLDS
def test_close_with_operations_under_way_does_not_hang(world):
    with world(2) as transports:
        transports[0].receive(torch.zeros(1, dtype=torch.uint8), 1)
        outcomes = run_ranks([transport.close for transport in transports], timeout_s=5)
        assert outcomes == [None, None]


@WORLDS
def test_buffers_that_a_transport_cannot_take_are_refused_before_anything_starts(world):
    flat = torch.zeros(8, dtype=torch.uint8)
    with world(2) as transports:
        own = transports[0]
        for wrong in (torch.zeros(8), flat.view(2, 4), flat[::2], torch.tensor(1, dtype=torch.uint8)):
            with pytest.raises(TransportError, match="contiguous 1-D uint8"):
                own.send(wrong, 1)
            with pytest.raises(TransportError, match="contiguous 1-D uint8"):
                own.receive(wrong, 1)
            with pytest.raises(TransportError, match="contiguous 1-D uint8"):
                own.broadcast(wrong, 0, (0, 1))
        for peer in (0, 2, -1):
            with pytest.raises(TransportError, match="is not another rank of a world of 2"):
                own.send(flat, peer)
        with pytest.raises(TransportError, match="not distinct ranks"):
            own.broadcast(flat, 0, (0, 0))
        with pytest.raises(TransportError, match="rank 0 is not among the members"):
            own.broadcast(flat, 1, (1,))
        with pytest.raises(TransportError, match="root 1 is not among the members"):
            own.broadcast(flat, 1, (0,))
        with pytest.raises(TransportError, match="2 members of 8 bytes need 16"):
            own.all_gather(flat, flat, (0, 1))
        assert in_world(transports, lambda rank: exchange(rank, lambda *_: 3, 1, LONG_S)) == [True, True]


def test_loopback_refuses_a_message_of_another_length_on_both_ends():
    def body(transport):
        start = transport.send if transport.rank == 0 else transport.receive
        start(torch.zeros(5 + transport.rank, dtype=torch.uint8), 1 - transport.rank).wait(Deadline.after(LONG_S))

    with loopback_world(2) as transports:
        outcomes = in_world(transports, body)
        assert all(isinstance(outcome, TransportError) for outcome in outcomes)
        assert any("the message has 5 bytes, the buffer 6" in str(outcome) for outcome in outcomes)


def test_loopback_refuses_members_that_come_to_different_collectives():
    def body(transport):
        buffer = torch.zeros(2, dtype=torch.uint8)
        if transport.rank == 0:
            transport.broadcast(buffer, 0, (0, 1)).wait(Deadline.after(LONG_S))
        else:
            transport.all_gather(torch.zeros(4, dtype=torch.uint8), buffer, (0, 1)).wait(Deadline.after(LONG_S))

    with loopback_world(2) as transports:
        outcomes = in_world(transports, body)
        assert all(isinstance(outcome, TransportError) for outcome in outcomes)
        assert any("others to" in str(outcome) for outcome in outcomes)


def test_a_loopback_send_needs_its_receiver():
    with loopback_world(2) as transports, pytest.raises(TransportTimeoutError, match="send to rank 1"):
        transports[0].send(torch.zeros(1, dtype=torch.uint8), 1).wait(Deadline.after(SHORT_S))
