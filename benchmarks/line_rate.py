"""Line rate: what gloo moves between 4 senders and 4 receivers on one host, bare and through our transport.

Every sender has a message stream to every receiver: 16 pairs, 1 GiB in all by default, contiguous buffers that stay
warm, many chunks in flight. The two run in turn in the same processes, so that they share the machine's mood.

    python benchmarks/line_rate.py --chunk-mib 4 --in-flight 16 --repeats 5
"""

import argparse
import json
import multiprocessing
import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.process_group import ProcessGroupTransport
from nemo_rl_reshard.transport.rendezvous import RendezvousServer, RendezvousStore

HOST = "127.0.0.1"
NUM_SENDERS = NUM_RECEIVERS = 4
WORLD_SIZE = NUM_SENDERS + NUM_RECEIVERS
TIMEOUT_S = 120.0

Start = Callable[[torch.Tensor, int, int], Callable[[], Any]]
"""Starts one chunk with a peer, given its number, and returns how to wait for it."""


def stream(start: Start, buffers: list[torch.Tensor], peers: list[int], chunk: int, in_flight: int) -> None:
    """Move every buffer to or from its peer in chunks, the peers in turn, `in_flight` chunks at once."""
    waiting: deque[Callable[[], Any]] = deque()
    for number in range(buffers[0].numel() // chunk):
        for buffer, peer in zip(buffers, peers, strict=True):
            waiting.append(start(buffer[number * chunk : (number + 1) * chunk], peer, number))
            if len(waiting) >= in_flight:
                waiting.popleft()()
    while waiting:
        waiting.popleft()()


def rank_body(rank: int, address: tuple[str, int], token: bytes, options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    store = RendezvousStore(address, token, TIMEOUT_S)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("bare", store),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    transport = ProcessGroupTransport(store, rank, WORLD_SIZE, host=HOST, timeout_s=TIMEOUT_S)
    sends = rank < NUM_SENDERS
    chunk = options.chunk_mib << 20
    per_pair = (options.total_mib << 20) // (NUM_SENDERS * NUM_RECEIVERS) // chunk * chunk
    # A sender reads the same live storage for all its receivers; a receiver fills one buffer per sender.
    own = torch.zeros(per_pair, dtype=torch.uint8)
    buffers = [own] * NUM_RECEIVERS if sends else [torch.zeros(per_pair, dtype=torch.uint8) for _ in range(NUM_SENDERS)]
    peers = [NUM_SENDERS + (turn + rank) % NUM_RECEIVERS for turn in range(NUM_RECEIVERS)]
    if not sends:
        peers = [(rank - NUM_SENDERS - turn) % NUM_SENDERS for turn in range(NUM_SENDERS)]

    def bare(buffer: torch.Tensor, peer: int, number: int) -> Callable[[], Any]:
        work = dist.isend(buffer, peer, tag=number) if sends else dist.irecv(buffer, peer, tag=number)
        return work.wait

    def ours(buffer: torch.Tensor, peer: int, _: int) -> Callable[[], Any]:
        pending = transport.send(buffer, peer) if sends else transport.receive(buffer, peer)
        return lambda: pending.wait(deadline)

    seconds: dict[str, list[float]] = {"bare": [], "ours": []}
    for turn in range(1 + options.repeats):
        for name, start in (("ours", ours), ("bare", bare)) if turn % 2 else (("bare", bare), ("ours", ours)):
            deadline = Deadline.after(TIMEOUT_S)
            dist.barrier()
            begun = time.perf_counter()
            stream(start, buffers, peers, chunk, options.in_flight)
            dist.barrier()
            seconds[name].append(time.perf_counter() - begun)
    results.send((per_pair * NUM_SENDERS * NUM_RECEIVERS, {name: taken[1:] for name, taken in seconds.items()}))
    transport.close()
    dist.destroy_process_group()
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk-mib", type=int, default=4, help="bytes of one message (default 4 MiB)")
    parser.add_argument("--in-flight", type=int, default=16, help="messages under way per rank (default 16)")
    parser.add_argument("--total-mib", type=int, default=1024, help="bytes over all pairs (default 1 GiB)")
    parser.add_argument("--repeats", type=int, default=5, help="measured runs after one warm-up (default 5)")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    token = secrets.token_bytes(32)
    with RendezvousServer(HOST, token) as server:
        ends, processes = [], []
        for rank in range(WORLD_SIZE):
            end, theirs = spawn.Pipe(duplex=False)
            process = spawn.Process(target=rank_body, args=(rank, server.address, token, options, theirs), daemon=True)
            process.start()
            ends.append(end)
            processes.append(process)
        nbytes, seconds = ends[0].recv()
        for process in processes:
            process.join()
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    report = {
        "nbytes": nbytes,
        "chunk_mib": options.chunk_mib,
        "in_flight": options.in_flight,
        "median_s": medians,
        "min_s": {name: min(taken) for name, taken in seconds.items()},
        "bytes_per_s": {name: nbytes / taken for name, taken in medians.items()},
        "cost": medians["ours"] / medians["bare"] - 1,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
