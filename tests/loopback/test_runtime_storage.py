"""Where bytes come from and where they land: strides, offsets, scalars, references kept by a loader, memory bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from equipment.refit_worlds import ThreadWorld, assert_gather_then_slice, mesh_layout, planned_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.params.routing import RoutePolicy
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.runtime.leftover_plan import Gather
from nemo_rl_reshard.runtime.one_process import together
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.protocol import Pending, Transport

TINY = PlanOptions(bucket_bytes=64, message_bytes=16)
W = "model.layers.0.mlp.down_proj.weight"


def rows_to_columns(shape: tuple[int, ...] = (6, 4), options: PlanOptions = TINY, **more: Any) -> ThreadWorld:
    return ThreadWorld(
        planned_ranks(
            [(W, mesh_layout(shape, (3,), range(3), "S(0)"), "float32")],
            [(W, mesh_layout(shape, (2, 2), range(3, 7), "R", "S(1)"), "float32")],
            num_trainers=3,
            num_targets=4,
            domains=((3, 4, 5, 6),),
            options=options,
            **more,
        )
    )


@pytest.mark.parametrize("policy", list(RoutePolicy))
def test_a_strided_target_is_written_and_its_neighbours_are_not(policy: RoutePolicy) -> None:
    """`B41`: columns 1..2 of a wider buffer of -1; the others stay -1, on direct and leftover routes alike."""
    with rows_to_columns(policy=policy) as world:
        buffers = {}
        for rank in range(3, 7):
            target = world.live[rank].target
            ((region, _),) = target.shards[W]
            buffers[rank] = torch.full((6, 5), -1.0)
            target.shards[W] = [(region, buffers[rank][:, 1:3])]
        for version in (1, 2):
            for each in world.live.values():
                if each.source is not None:
                    each.fill(version)
            reports = world.outcomes(version)
            assert all(isinstance(report, dict) for report in reports.values()), reports
            assert_gather_then_slice(world.live)
            for buffer in buffers.values():
                assert buffer[:, 0].eq(-1).all()
                assert buffer[:, 3:].eq(-1).all()


@pytest.mark.parametrize("policy", list(RoutePolicy))
@pytest.mark.parametrize("kind", ["transposed", "offset", "padded"])
def test_strided_and_padded_sources(kind: str, policy: RoutePolicy) -> None:
    """`B40`, `B42`, `B04`: what travels is the view, not the storage; the padding of a shard never leaves it."""
    with rows_to_columns(policy=policy) as world:
        for rank in range(3):
            source = world.live[rank].source
            ((region, values),) = source.shards[W]
            if kind == "transposed":
                strided = torch.empty(values.shape[::-1]).t()
            elif kind == "offset":
                strided = torch.full((values.shape[0] + 1, values.shape[1]), torch.nan)[1:]
            else:
                strided = torch.full((values.shape[0], values.shape[1] + 3), torch.nan)[:, :-3]
            source.shards[W] = [(region, strided)]
        world.refit(1)
        world.refit(2)


def test_storage_that_moves_between_refits() -> None:
    """A trainer that replaces its parameters, as offloading does, is read where it is now; nothing old is kept."""
    with rows_to_columns() as world:
        world.refit(1)
        for rank in range(3):
            source = world.live[rank].source
            ((region, values),) = source.shards[W]
            source.shards[W] = [(region, torch.empty_like(values))]
            values.fill_(torch.nan)
        world.refit(2)


@pytest.mark.parametrize("policy", list(RoutePolicy))
def test_scalars_and_integers(policy: RoutePolicy) -> None:
    """`B43`: a 0-d float, a 0-d int64 and a bool vector beside a sharded matrix; shape () is kept."""
    whole = Region((), ())
    held = TensorLayout.from_regions((), {0: [whole], 1: [whole]})
    needed = TensorLayout.from_regions((), {rank: [whole] for rank in (2, 3, 4)})
    source = [
        ("w", mesh_layout((4, 3), (2,), range(2), "S(0)"), "float32"),
        ("scale", held, "float32"),
        ("count", held, "int64"),
        ("mask", mesh_layout((5,), (2,), range(2), "S(0)"), "bool"),
    ]
    target = [
        ("w", mesh_layout((4, 3), (3,), range(2, 5), "S(1)"), "float32"),
        ("scale", needed, "float32"),
        ("count", needed, "int64"),
        ("mask", mesh_layout((5,), (3,), range(2, 5), "R"), "bool"),
    ]
    with ThreadWorld(planned_ranks(source, target, num_trainers=2, num_targets=3, policy=policy)) as world:
        shapes: list[tuple[str, torch.Size]] = []
        load = world.live[2].target.load

        def spying_load(named: Any) -> None:
            shapes.extend((name, tensor.shape) for name, tensor in named)
            load(named)

        world.live[2].target.load = spying_load
        world.refit(1)
        world.refit(2)
        if policy is RoutePolicy.FFN:
            assert dict(shapes) == {"w": (4, 3), "scale": (), "count": (), "mask": (5,)}


@pytest.mark.parametrize("gather", [None, Gather.EVERYWHERE])
def test_a_loader_that_keeps_references_owns_what_it_keeps(gather: Gather | None) -> None:
    """`B44`: more batches than buffers; what was handed over keeps its values, and views of it do too."""
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(5)]
    ranks = planned_ranks(
        [(name, mesh_layout((6,), (2,), range(2), "S(0)"), "float32") for name in names],
        [(name, mesh_layout((6,), (3,), range(2, 5), "R"), "float32") for name in names],
        num_trainers=2,
        num_targets=3,
        options=PlanOptions(bucket_bytes=4 * 32, message_bytes=16),
        policy=RoutePolicy.FFN,
        gather=gather,
    )
    with ThreadWorld(ranks) as world:
        target = world.live[3].target
        kept: list[tuple[str, torch.Tensor]] = []
        real_load, real_finish = target.load, target.finish

        def deferred_load(named: Any) -> None:
            kept.extend((name, tensor[:]) for name, tensor in named)
            target.loaded += [name for name, _ in named]

        def finish(version: int) -> None:
            target.loaded = []
            real_load(kept)
            kept.clear()
            real_finish(version)

        target.load, target.finish = deferred_load, finish
        assert len(ranks[3].assignment.leftovers.batches) == (5 if gather else 0)
        world.refit(1)
        world.refit(2)


class _Allocations(TorchDispatchMode):
    """Bytes of every tensor made on this thread that owns new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else [result]
        known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        for tensor in made:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.nbytes += tensor.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extra_memory_is_two_buckets_at_most(dtype: str) -> None:
    """`B76`: 16 matrices of 1 MiB, buckets of 512 KiB; staging is allocated once, and not again for the next refit."""
    bucket = 512 << 10
    names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(16)]
    ranks = planned_ranks(
        [(name, mesh_layout((512, 512), (2,), range(2), "S(0)"), "float32") for name in names],
        [(name, mesh_layout((512, 512), (2, 2), range(2, 6), "R", "S(1)"), dtype) for name in names],
        num_trainers=2,
        num_targets=4,
        domains=((2, 3, 4, 5),),
        options=PlanOptions(bucket_bytes=bucket, message_bytes=64 << 10),
        in_flight=40,  # five buckets' worth: the bucket must be what bounds
    )
    with ThreadWorld(ranks) as world:
        for each in world.live.values():
            each.fill(1)

        def counted(rank: int, version: int) -> tuple[int, int]:
            with _Allocations() as allocations:
                report = world.sessions[rank].refit({"version": version, "deadline_s": 20.0})
            return allocations.nbytes, report["peak_extra_bytes"]

        agreements = 4096  # a few digests; not staging
        for version, limit in ((1, 2 * bucket + agreements), (2, agreements)):
            outcomes = together({rank: partial(counted, rank, version) for rank in world.live}, 60.0)
            for rank, outcome in outcomes.items():
                allocated, reported = outcome
                assert allocated <= limit, (rank, version)
                assert reported <= 2 * bucket, rank
                if version == 1:
                    assert reported <= allocated <= reported + agreements, rank
        assert_gather_then_slice(world.live)
        assert any(reported for _, reported in outcomes.values())


class _Counting:
    """Wraps a transport and remembers how many sends, and how many receives, were ever under way at once."""

    def __init__(self, inner: Transport) -> None:
        self.rank, self.size, self._inner = inner.rank, inner.size, inner
        self.under_way: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, buffer: torch.Tensor, dst: int) -> Pending:
        return self._started("send", self._inner.send(buffer, dst))

    def receive(self, buffer: torch.Tensor, src: int) -> Pending:
        return self._started("receive", self._inner.receive(buffer, src))

    def _started(self, kind: str, pending: Pending) -> Pending:
        self.under_way[kind] += 1
        self.most[kind] = max(self.most[kind], self.under_way[kind])
        return _Finishing(pending, partial(self.under_way.subtract, [kind]))


class _Finishing:
    """Calls `done` once its operation is complete."""

    def __init__(self, inner: Pending, done: Callable[[], None]) -> None:
        self._inner, self._done = inner, done

    def wait(self, deadline: Deadline) -> None:
        self._inner.wait(deadline)
        self._done()


@pytest.mark.parametrize("placement", ["S(0)", "S(1)"], ids=["in place", "staged"])
def test_no_more_messages_are_under_way_than_the_window_allows(placement: str) -> None:
    ranks = planned_ranks(
        [(W, mesh_layout((24, 8), (2,), range(2), placement), "float32")],
        [(W, mesh_layout((24, 8), (2,), range(2, 4), "S(0)"), "float32")],
        num_trainers=2,
        num_targets=2,
        options=PlanOptions(bucket_bytes=1 << 20, message_bytes=32),
        in_flight=3,
    )
    counting: dict[int, _Counting] = {}

    def wrap(rank: int, transport: Transport) -> Transport:
        counting[rank] = _Counting(transport)
        return counting[rank]

    with ThreadWorld(ranks) as world:
        world.wrap = {rank: partial(wrap, rank) for rank in world.live}
        world.rebuild()
        world.refit(1, verify="off")
    assert {rank: max(each.most.values()) for rank, each in counting.items()} == dict.fromkeys(range(4), 3)
    assert not any(each.under_way.total() for each in counting.values())
