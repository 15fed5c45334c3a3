"""What NeMo RL's own Python reshard plans for a refit spec by model, timed for one rank; needs a NeMo RL checkout.

Two files of the checkout are loaded: `nccl_reshard_utils.py`, which writes down meshes and placements of every tensor
that it reshards, and `xferdtensor_python.py`, which every rank runs tensor by tensor: it plans a tensor's transfers for
all ranks, keeps the last 1,024 plans, and picks out its own. Here it runs as it is, on tensors without memory and with
a communicator that counts, so all of a refit but the bytes is timed. NCCL M2N, which NeMo RL prefers where it is
installed, is not in the checkout and is not measured.
"""

from __future__ import annotations

import time
import types
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peer_modules import PeerTensor, load_module, without_gpus

from nemo_rl_reshard.cli.refit_spec import RefitSpec
from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.plan.transfer import RankProgram

REPEATS = 3

_Box = tuple[tuple[int, int], ...]  # start and stop per dim, as NeMo RL writes a region


@dataclass(frozen=True)
class PeerEntry:
    """One tensor as NeMo RL reshards it. `members` are the checkpoint's names in it: an expert each, or its own."""

    table_row: Mapping[str, Any]
    members: tuple[str, ...]
    stage: int


@dataclass
class Traffic:
    """What one rank hands to NCCL in one refit: point-to-point messages, and exchanges among engines' replicas."""

    messages: int = 0
    exchanges: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    exchanged_bytes: int = 0
    """Received in exchanges; as much is sent in them."""


@dataclass
class Translation:
    """A spec in NeMo RL's words: its entries in model order, and the names left out by reason."""

    entries: list[PeerEntry]
    left_out: dict[str, list[str]]
    stage_ranks: int
    num_trainers: int
    notes: list[str] = field(default_factory=list)
    """What was given to NeMo RL's planner that its configuration could not ask for."""

    @property
    def names(self) -> frozenset[str]:
        """The checkpoint's names that NeMo RL reshards."""
        return frozenset(name for entry in self.entries for name in entry.members)

    def entries_of(self, rank: int) -> list[PeerEntry]:
        """What a rank takes part in: a trainer in its stage's tensors, an engine in all."""
        if rank >= self.num_trainers:
            return self.entries
        return [entry for entry in self.entries if entry.stage == rank // self.stage_ranks]

    def rank_in_group(self, rank: int) -> int:
        """The number of a rank in the communicator of a stage: its trainers, then all engines."""
        return rank % self.stage_ranks if rank < self.num_trainers else self.stage_ranks + rank - self.num_trainers

    def rank_of(self, number: int, stage: int) -> int:
        """The other way round."""
        if number < self.stage_ranks:
            return stage * self.stage_ranks + number
        return self.num_trainers + number - self.stage_ranks


class PeerPlanner:
    """The two files of a checkout. Raises OSError where they are missing."""

    def __init__(self, checkout: Path) -> None:
        self.rules = load_module(checkout, "nccl_reshard_utils")
        self.reshard = load_module(checkout, "xferdtensor_python")

    def translate(self, spec: RefitSpec, plain: Mapping[str, Any]) -> Translation:
        """`plain` is the spec by model that `spec` was read from.

        A tensor whose layouts NeMo RL's meshes and placements do not describe, on either side, is left out. Raises
        ValueError where a side as a whole cannot be described.
        """
        sizes = {side: _sizes(plain[side]) for side in ("source", "target")}
        num_trainers, num_engines = len(spec.source.ranks), len(spec.target.ranks)
        stage_ranks = num_trainers // sizes["source"]["pp_size"]
        left_out: defaultdict[str, list[str]] = defaultdict(list)
        metadata = {}
        for name, wire in spec.target.specs.items():
            if self.rules.is_nccl_reshard_param(name):
                metadata[name] = {"shape": list(wire.shape), "dtype": f"torch.{wire.dtype}"}
            else:
                left_out["shared experts" if "shared_expert" in name else "no feed-forward projection"].append(name)
        stages = {
            self.rules._extract_layer_name(name): spec.source.layouts[name].ranks[0] // stage_ranks for name in metadata
        }
        table = self.rules.build_nccl_reshard_refit_info(
            metadata, sizes["source"], sizes["target"], num_trainers, num_engines, layer_to_pp_stage=stages
        )
        made = Translation([], left_out, stage_ranks, num_trainers)
        dealt = [count for _, count in sorted(Counter(stages.values()).items())]
        if len(set(dealt[1:-1])) > 1:
            made.notes.append(f"its configuration cannot deal layers {dealt} to pipeline stages; its planner can")
        described = _Described(self.reshard, made)
        members = self._members(metadata)
        for row in (row for layer in table["layer_names"] for row in table["per_layer_params"][layer]):
            entry = PeerEntry(row, members[row["name"]], row.get("pp_stage", 0))
            if described.agrees(entry, spec.source, spec.target):
                made.entries.append(entry)
            else:
                left_out["layouts that its meshes do not describe"].extend(entry.members)
        return made

    def regions(self, entry: PeerEntry, side: str) -> Mapping[int, _Box]:
        """NeMo RL's own regions of the ranks of a stage's communicator; `side` is src or dst."""
        row = entry.table_row
        found: Mapping[int, _Box] = self.reshard._rank_regions(
            row[f"{side}_mesh_info"], row[f"{side}_placements"], row["global_shape"]
        )
        return found

    def transfers(self, entry: PeerEntry) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """NeMo RL's own plan of a tensor, in numbers of the stage's communicator.

        First (source, receiver, box) of every message, then (box, members, root) of every group of equal receivers,
        which complete their shard among themselves.
        """
        found = self._geometry(entry)
        if found is None:
            found = self.reshard._plan_geometry(*_geometry_of(entry))
        return found[3], found[2]

    def measure(self, made: Translation, rank: int) -> tuple[dict[str, float], Traffic]:
        """Seconds of one rank, medians of a few runs, and what it hands to NCCL in one refit.

        `plan_s` is planning all its tensors for the first time; `first_refit_s` is that and everything else but the
        bytes, `later_refit_s` the same with the plans at hand.
        """
        entries = made.entries_of(rank)
        traffic = Traffic()
        calls = list(self._calls(entries, made, rank, traffic))
        times: defaultdict[str, list[float]] = defaultdict(list)
        with without_gpus(lambda: None):
            for _ in range(REPEATS):
                self.reshard.clear_xferdtensor_python_caches()
                start_s = time.perf_counter()
                for entry in entries:
                    self._geometry(entry)
                times["plan_s"].append(time.perf_counter() - start_s)
                self.reshard.clear_xferdtensor_python_caches()
                for turn in ("first_refit_s", "later_refit_s"):
                    vars(traffic).update(vars(Traffic()))
                    start_s = time.perf_counter()
                    for call in calls:
                        self.reshard.xferdtensor_python_impl(*call)
                    times[turn].append(time.perf_counter() - start_s)
        return {name: median(values) for name, values in times.items()}, traffic

    def distinct(self, made: Translation, rank: int) -> tuple[int, int]:
        """How many different plans the tensors of a rank have, and how many are striped over replicas."""
        self.reshard.clear_xferdtensor_python_caches()
        for entry in made.entries_of(rank):
            self._geometry(entry)
        plans = list(self.reshard._STRIPED_PLAN_CACHE.values())
        return len(plans), sum(plan is not None for plan in plans)

    def _geometry(self, entry: PeerEntry) -> Any:
        return self.reshard._striped_geometry(*_geometry_of(entry))

    def _calls(
        self, entries: Iterable[PeerEntry], made: Translation, rank: int, traffic: Traffic
    ) -> Iterator[tuple[Any, ...]]:
        """The arguments of each call of the rank, with meta tensors of the right shapes."""
        number = made.rank_in_group(rank)
        groups: dict[int, Any] = {}  # one communicator per stage
        stream = types.SimpleNamespace(cuda_stream=0)
        for entry in entries:
            row = entry.table_row
            side = "src" if rank < made.num_trainers else "dst"
            box = self.regions(entry, side)[number]
            local = torch.empty(
                [stop - start for start, stop in box],
                dtype=getattr(torch, row["dtype"].removeprefix("torch.")),
                device="meta",
            )
            mine = PeerTensor(local, row["global_shape"])
            src_mesh, src_placements, dst_mesh, dst_placements, _ = _geometry_of(entry)
            group = groups.setdefault(
                entry.stage, types.SimpleNamespace(rank=number, nccl_communicator=_CountingCommunicator(traffic))
            )
            yield (
                mine if side == "src" else None,
                src_mesh,
                src_placements,
                mine if side == "dst" else None,
                dst_mesh,
                dst_placements,
                group,
                stream,
            )

    def _members(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Name of an entry -> names in the checkpoint; experts in the order of their numbers, as they are stacked."""
        experts: defaultdict[str, dict[int, str]] = defaultdict(dict)
        found: dict[str, tuple[str, ...]] = {}
        for name in names:
            match = self.rules._INDIVIDUAL_EXPERT_RE.match(name)
            if match is None:
                found[name] = (name,)
            else:
                experts[f"{match[1]}.{match[3]}.weight"][int(match[2])] = name
        found.update({name: tuple(by[index] for index in sorted(by)) for name, by in experts.items()})
        return found


class _CountingCommunicator:
    """Counts what nccl4py's communicator is asked for. `key` is the place in a group of replicas, 0 for its root."""

    def __init__(self, traffic: Traffic, key: int | None = None) -> None:
        self._traffic, self._key = traffic, key

    def send(self, buffer: torch.Tensor, *_: Any, **__: Any) -> None:
        self._traffic.messages += 1
        self._traffic.sent_bytes += buffer.nbytes

    def recv(self, buffer: torch.Tensor, *_: Any, **__: Any) -> None:
        self._traffic.messages += 1
        self._traffic.received_bytes += buffer.nbytes

    def allgather(self, sendbuf: torch.Tensor, recvbuf: torch.Tensor, **_: Any) -> None:
        self._traffic.exchanges += 1
        self._traffic.exchanged_bytes += recvbuf.nbytes - sendbuf.nbytes

    def broadcast(self, recvbuf: torch.Tensor, root: int, **_: Any) -> None:
        self._traffic.exchanges += 1
        self._traffic.exchanged_bytes += recvbuf.nbytes * (self._key != root)

    def split(self, _color: int, key: int) -> _CountingCommunicator:
        return _CountingCommunicator(self._traffic, key)


@dataclass
class _Described:
    """Compares NeMo RL's regions with the layouts of the two catalogs; equal questions are asked once."""

    reshard: Any
    made: Translation
    layouts: dict[Any, Any] = field(default_factory=dict)
    equal: dict[tuple[int, int], bool] = field(default_factory=dict)

    def agrees(self, entry: PeerEntry, source: Catalog, target: Catalog) -> bool:
        return all(
            self._is_same(theirs, catalog.layouts[name])
            for side, catalog in (("src", source), ("dst", target))
            for name, theirs in zip(entry.members, self._layouts_of(entry, side), strict=True)
        )

    def _is_same(self, theirs: TensorLayout, ours: TensorLayout) -> bool:
        key = (id(theirs), id(ours))
        if key not in self.equal:
            self.equal[key] = theirs == ours
        return self.equal[key]

    def _layouts_of(self, entry: PeerEntry, side: str) -> list[TensorLayout]:
        """The layout of each member. Of stacked experts a rank has those whose numbers its first dim covers."""
        row = entry.table_row
        mesh, placements, shape = row[f"{side}_mesh_info"], row[f"{side}_placements"], tuple(row["global_shape"])
        stacked = "grouped_expert_proj" in row
        key = (id(mesh), tuple(map(repr, placements)), shape, stacked, entry.stage if side == "src" else -1)
        if key not in self.layouts:
            boxes = self.reshard._rank_regions(mesh, placements, shape)
            held = {self.made.rank_of(number, entry.stage): box for number, box in boxes.items()}
            self.layouts[key] = _unstacked(held, shape) if stacked else [_layout(held, shape)]
        found: list[TensorLayout] = self.layouts[key]
        return found


def _geometry_of(entry: PeerEntry) -> tuple[Any, Any, Any, Any, tuple[int, ...]]:
    row = entry.table_row
    sides = [row[f"{side}_{what}"] for side in ("src", "dst") for what in ("mesh_info", "placements")]
    return (*sides, row["global_shape"])  # type: ignore[return-value]


def _unstacked(held: Mapping[int, _Box], shape: tuple[int, ...]) -> list[TensorLayout]:
    """One layout per index of the first dim; neighbours that lie with the same ranks share it."""
    cuts = sorted({0, *(edge for box in held.values() for edge in box[0])})
    layouts = [
        _layout({rank: box[1:] for rank, box in held.items() if box[0][0] <= start < box[0][1]}, shape[1:])
        for start in cuts
    ]
    return [layouts[bisect_right(cuts, index) - 1] for index in range(shape[0])]


def _layout(held: Mapping[int, _Box], shape: tuple[int, ...]) -> TensorLayout:
    return TensorLayout.from_regions(
        shape,
        {
            rank: [Region(tuple(a for a, _ in box), tuple(b - a for a, b in box))]
            for rank, box in held.items()
        },
    )  # fmt: skip


def _sizes(side: Mapping[str, Any]) -> dict[str, int]:
    """Parallel sizes in NeMo RL's words. Raises ValueError for what it refuses in its configuration."""
    if side["backend"] not in {"megatron", "vllm"}:
        raise ValueError(f"NeMo RL reshards from Megatron to vLLM alone, not {side['backend']}")
    if side.get("etp", 1) != 1:
        raise ValueError("NeMo RL reshards no experts that the trainer cuts (etp)")
    if side["backend"] == "vllm" and (side.get("pp", 1) != 1 or side.get("ep", 1) not in {1, side.get("tp", 1)}):
        raise ValueError("NeMo RL reshards to engines without pipeline stages, of which EP is 1 or equal to TP")
    return {f"{key}_size": int(side.get(key, 1)) for key in ("tp", "ep", "pp")}


def beside(
    checkout: Path, plain: Mapping[str, Any], spec: RefitSpec, programs: Mapping[str, RankProgram]
) -> dict[str, Any]:
    """Run NeMo RL's planner on a spec by model, for the ranks of `programs`, which are ours; as plain values."""
    planner = PeerPlanner(checkout)
    made = planner.translate(spec, plain)
    if not made.entries:
        raise ValueError("NeMo RL reshards nothing of this spec")
    plans, striped = planner.distinct(made, spec.target.ranks[-1])
    ranks = {}
    for label, program in programs.items():
        seconds, traffic = planner.measure(made, program.rank)
        entries = len(made.entries_of(program.rank))
        ranks[label] = {
            "rank": program.rank,
            "nemo_rl": {**seconds, "entries": entries, **vars(traffic)},
            "ours": our_traffic(program, made.names),
        }
    return {
        "entries": len(made.entries),
        "names": len(made.names),
        "plans": plans,
        "striped": striped,
        "left_out": {
            reason: {"names": len(names), "nbytes": sum(spec.target.specs[name].nbytes for name in names)}
            for reason, names in made.left_out.items()
        },
        "notes": made.notes,
        "ranks": ranks,
    }


def our_traffic(program: RankProgram, names: frozenset[str]) -> dict[str, int]:
    """Messages of our program that carry parts of `names`, and the bytes of these parts that the rank takes and sends.

    A local copy is no message.
    """
    found = dict.fromkeys(("messages", "received_bytes", "sent_bytes"), 0)
    for message in program.messages:
        nbytes = sum(part.nbytes for part in message.parts if part.tensor in names)
        if nbytes and message.src != message.dst:
            found["messages"] += 1
            found["received_bytes" if message.dst == program.rank else "sent_bytes"] += nbytes
    return found
