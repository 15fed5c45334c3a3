"""The process-group transport between real processes: order, sizes, deadlines, aborts, deaths, generations."""

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from equipment.all_to_all import exchange, uneven
from equipment.spawned_worlds import HOST, run_spawned

from nemo_rl_reshard.errors import HandshakeError, TransportError, TransportTimeoutError
from nemo_rl_reshard.transport.abort_watcher import abort_key
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.process_group import ProcessGroupTransport
from nemo_rl_reshard.transport.rendezvous import RendezvousServer, RendezvousStore

LONG_S = 30.0


def in_a_world_of_its_own(seat):
    """Refit beside a default process group of another size, as a trainer does; and touch it not at all."""
    if seat.rank < 2:
        own = seat.store()
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("trainers", own), rank=seat.rank, world_size=2, timeout=timedelta(seconds=30)
        )
    store = seat.store()
    transport = seat.join(store)
    intact = [exchange(transport, uneven, 21, LONG_S), exchange(transport, uneven, 21, LONG_S)]
    gathered = []
    for ranks in [tuple(range(seat.size)), (4, 0, 2), (1, 3)]:
        if seat.rank in ranks:
            own = torch.full((70_001,), seat.rank, dtype=torch.uint8)
            output = torch.zeros(70_001 * len(ranks), dtype=torch.uint8)
            transport.all_gather(output, own, ranks).wait(Deadline.after(LONG_S))
            transport.broadcast(own, ranks[-1], ranks).wait(Deadline.after(LONG_S))
            gathered.append((output.view(len(ranks), -1).unique(dim=1).flatten().tolist(), own.unique().tolist()))
    transport.close()
    store.close()
    if seat.rank < 2:
        total = torch.tensor([seat.rank + 1])
        dist.all_reduce(total)
        intact.append(int(total))
        dist.destroy_process_group()
    return intact, gathered


def test_five_processes_exchange_everything_beside_default_groups_of_another_size():
    outcomes = run_spawned(in_a_world_of_its_own, 5)
    for rank, (intact, gathered) in enumerate(outcomes):
        assert intact == [True, True, 3] if rank < 2 else [True, True]
        memberships = [ranks for ranks in [(0, 1, 2, 3, 4), (4, 0, 2), (1, 3)] if rank in ranks]
        assert gathered == [(list(ranks), [ranks[-1]]) for ranks in memberships]


def wait_for(transport, kind, peer, deadline_s=LONG_S):
    """Start one operation that a peer never takes part in; returns the error, and the seconds until it came."""
    buffer = torch.zeros(8, dtype=torch.uint8)
    start = time.monotonic()
    try:
        if kind == "receive":
            transport.receive(buffer, peer).wait(Deadline.after(deadline_s))
        else:
            ranks = tuple(sorted((transport.rank, peer)))
            transport.all_gather(torch.zeros(16, dtype=torch.uint8), buffer, ranks).wait(Deadline.after(deadline_s))
    except TransportError as fault:
        return fault, time.monotonic() - start
    raise AssertionError(f"rank {transport.rank} waited for nothing")


def die_while_others_wait(seat):
    store = seat.store()
    transport = seat.join(store)
    store.add("ready", 1)
    if seat.rank == 1:
        while store.add("ready", 0) < seat.size:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    # Rank 0 waits for the victim, rank 2 for rank 0, rank 3 on the way into a group: only rank 0 sees the death itself.
    kind, peer = {0: ("receive", 1), 2: ("receive", 0), 3: ("all_gather", 2)}[seat.rank]
    fault, woken_s = wait_for(transport, kind, peer)
    transport.close()
    store.close()
    return type(fault).__name__, str(fault), woken_s


def test_b61_a_killed_rank_is_an_error_on_every_other_rank_long_before_the_deadline():
    outcomes = run_spawned(die_while_others_wait, 4)
    assert outcomes[1] == -signal.SIGKILL
    kind, message, _ = outcomes[0]
    assert kind == "TransportError"
    assert message.startswith("rank 0: receive from rank 1 failed: ")
    for survivor in (2, 3):
        assert outcomes[survivor][:2] == ("RefitAbortedError", message)
    assert all(outcomes[survivor][2] < 10 for survivor in (0, 2, 3))


def stall_once_then_refit(seat):
    """A refit in which rank 2 stalls; then, in the next generation, one that works."""
    store = seat.store()
    transport = seat.join(store, generation=0)
    if seat.rank == 2:
        store.stop_key = None  # a rank that hangs hears nothing
        store.get("others gave up")
    fault, woken_s = wait_for(transport, "receive", {0: 2, 1: 0, 2: 0}[seat.rank], 1 if seat.rank == 0 else LONG_S)
    if seat.rank == 0:
        store.set("others gave up", "1")
    with pytest.raises(type(fault)):
        transport.send(torch.zeros(8, dtype=torch.uint8), (seat.rank + 1) % seat.size)
    transport.close()
    again = seat.join(store, generation=1)
    intact = exchange(again, uneven, 14, LONG_S)
    again.close()
    store.close()
    return type(fault).__name__, str(fault), woken_s, intact


def test_a_stalled_rank_is_named_and_the_next_generation_works():
    waited, called_off, stalled = run_spawned(stall_once_then_refit, 3)
    assert waited[:2] == ("TransportTimeoutError", "rank 0: receive from rank 2 passed its deadline of 1 s")
    assert called_off[:2] == ("RefitAbortedError", waited[1])
    assert stalled[:2] == ("RefitAbortedError", waited[1])
    assert 0.9 < waited[2] < 3
    assert waited[2] - 0.1 < called_off[2] < 4
    assert [outcome[3] for outcome in (waited, called_off, stalled)] == [True] * 3


def block_until_called_off(seat):
    store = seat.store()
    transport = seat.join(store)
    store.add("blocked", 1)
    fault, _ = wait_for(transport, "all_gather" if seat.rank == 0 else "receive", 2 if seat.rank == 0 else 0)
    woken_s = time.time()
    transport.close()
    store.close()
    return type(fault).__name__, str(fault), woken_s


def test_the_driver_calls_a_refit_off_and_blocked_ranks_wake_within_a_second():
    """One of them is not in a wait but on its way into a group whose other member never comes."""
    called_s = []

    def call_off(store):
        while store.add("blocked", 0) < 3:
            time.sleep(0.01)
        called_s.append(time.time())
        store.compare_set(abort_key(generation=0), "", "the driver gave up")

    outcomes = run_spawned(block_until_called_off, 3, meanwhile=call_off)
    for kind, reason, woken_s in outcomes:
        assert (kind, reason) == ("RefitAbortedError", "the driver gave up")
        assert woken_s - called_s[0] < 1


def join_and_leave(seat, timeout_s):
    store = seat.store()
    try:
        seat.join(store, timeout_s).close()
    finally:
        store.close()


def test_b16_a_world_with_a_missing_rank_fails_by_its_deadline_and_names_it():
    outcomes = run_spawned(join_and_leave, 3, 1.0, num_started=2)
    assert all(isinstance(outcome, TransportError) for outcome in outcomes)
    late = [outcome for outcome in outcomes if isinstance(outcome, TransportTimeoutError)]
    assert late
    assert all("[2] did not come within 1 s" in str(outcome) for outcome in late)


def test_b16_ranks_that_disagree_on_the_world_do_not_form_one():
    """Rank 0 believes in a world of 2 and could form one with rank 1, which believes in 3."""
    token = bytes(range(32))
    with RendezvousServer(HOST, token) as server, ThreadPoolExecutor(2) as pool:

        def join(rank, size):
            store = RendezvousStore(server.address, token, LONG_S)
            try:
                ProcessGroupTransport(store, rank, size, host=HOST, timeout_s=1).close()
            finally:
                store.close()

        faults = [pool.submit(join, 0, 2).exception(20), pool.submit(join, 1, 3).exception(20)]
        assert all(isinstance(fault, TransportError | HandshakeError) for fault in faults), faults


def open_a_rendezvous(seat):
    store = seat.store()
    store.add("ready", 1)
    while store.add("ready", 0) < seat.size:
        time.sleep(0.01)
    token = bytes(range(32))
    with RendezvousServer(HOST, token) as server:
        own = RendezvousStore(server.address, token, 10)
        own.set("mine", str(seat.rank))
        store.add("open", 1)
        while store.add("open", 0) < seat.size:
            time.sleep(0.01)
        value = own.get("mine")
        own.close()
        store.close()
        return server.address[1], int(value)


def test_b72_eight_processes_open_a_rendezvous_at_once_on_distinct_ports():
    outcomes = run_spawned(open_a_rendezvous, 8)
    assert len({port for port, _ in outcomes}) == 8
    assert [rank for _, rank in outcomes] == list(range(8))


def test_a_lost_rendezvous_ends_the_refit_and_close_still_works():
    token = bytes(range(32))
    server = RendezvousServer(HOST, token)
    with ThreadPoolExecutor(2) as pool:

        def run(rank):
            store = RendezvousStore(server.address, token, LONG_S)
            transport = ProcessGroupTransport(store, rank, 2, host=HOST, timeout_s=LONG_S)
            store.add("blocked", 1)
            with pytest.raises(TransportError) as raised:
                transport.receive(torch.zeros(8, dtype=torch.uint8), 1 - rank).wait(Deadline.after(LONG_S))
            transport.abort("nobody is left to hear this")
            transport.close()
            store.close()
            return str(raised.value)

        outcomes = [pool.submit(run, rank) for rank in range(2)]
        store = RendezvousStore(server.address, token, LONG_S)
        while store.add("blocked", 0) < 2:
            time.sleep(0.01)
        server.close()
        store.close()
        messages = [outcome.result(20) for outcome in outcomes]
    assert any("lost the rendezvous" in message for message in messages), messages


def listening_here() -> set[str]:
    """Addresses, in the kernel's own notation, on which this process listens over IPv4 or IPv6."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists the directory is gone by now
            inodes.add(str(descriptor.readlink()))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                found.add(local.split(":")[0])
    return found


def report_where_it_listens(seat):
    store = seat.store()
    before = listening_here()
    transport = seat.join(store)
    during = listening_here()
    exchange(transport, uneven, 7, LONG_S)
    transport.close()
    store.close()
    return before, during


def test_every_socket_of_a_rank_listens_on_its_own_address_only():
    """127.0.0.1 is 0100007F in the kernel's table."""
    assert run_spawned(report_where_it_listens, 2) == [(set(), {"0100007F"})] * 2


def test_a_host_that_is_not_ours_is_refused():
    token = bytes(range(32))
    with RendezvousServer(HOST, token) as server:
        store = RendezvousStore(server.address, token, 5)
        with pytest.raises(TransportError, match=r"gloo cannot listen on '198\.51\.100\.7'"):
            ProcessGroupTransport(store, 0, 1, host="198.51.100.7", timeout_s=5)
        store.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no CUDA")
def test_nccl_without_cuda_says_what_is_missing():
    token = bytes(range(32))
    with RendezvousServer(HOST, token) as server:
        store = RendezvousStore(server.address, token, 5)
        with pytest.raises(TransportError, match="the nccl transport needs a CUDA device"):
            ProcessGroupTransport(store, 0, 1, host=HOST, timeout_s=5, backend="nccl")
        with pytest.raises(TransportError, match="unknown transport backend 'mpi'; known are gloo and nccl"):
            ProcessGroupTransport(store, 0, 1, host=HOST, timeout_s=5, backend="mpi")
        store.close()
