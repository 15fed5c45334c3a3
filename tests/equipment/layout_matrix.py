"""The case table of layout pairs: how trainers hold tensors, how engines need them, and why the pair is there."""

from __future__ import annotations

from equipment.plan_case import Box, Boxes, Grid, Held, PlanCase, TensorPair
from nemo_rl_reshard.params.routing import RoutePolicy

UP = "model.layers.{}.mlp.up_proj.weight"
DOWN = "model.layers.{}.mlp.down_proj.weight"
NORM = "model.layers.{}.input_layernorm.weight"
EXPERT = "model.layers.{}.mlp.experts.{}.up_proj.weight"


def one(shape: tuple[int, ...], source: Held, target: Held, **rest: str) -> tuple[TensorPair, ...]:
    """Two layers of one kind, so that something takes turns and steps follow each other."""
    return tuple(TensorPair(UP.format(layer), shape, source, target, **rest) for layer in range(2))


def line(placement: str, *ranks: int) -> Grid:
    """A mesh of one axis."""
    return Grid((len(ranks),), placement, ranks)


def whole(shape: tuple[int, ...], *ranks: int) -> Boxes:
    """All of a tensor on each of `ranks`."""
    return Boxes(tuple((rank, (((0,) * len(shape), shape),)) for rank in ranks))


def rows(columns: int, **blocks: tuple[int, int]) -> Boxes:
    """Row blocks of a matrix: r3=(first, count) for rank 3."""
    boxes: list[tuple[int, tuple[Box, ...]]] = []
    for name, (first, count) in blocks.items():
        boxes.append((int(name.removeprefix("r")), (((first, 0), (count, columns)),)))
    return Boxes(tuple(boxes))


_STAGES = ((0, 1), (2, 3), (4, 5))  # ranks of three pipeline stages, tensor parallel by two
_WIDE_ENGINES = tuple(tuple(range(8 + 4 * engine, 12 + 4 * engine)) for engine in range(4))

LAYOUT_MATRIX: tuple[PlanCase, ...] = (
    PlanCase(
        "rows_to_columns_2_to_4",
        "the announcement's first example: 8 transfers of 4x2, no full matrix anywhere",
        one((8, 8), line("S(0)", 0, 1), line("S(1)", 2, 3, 4, 5)),
    ),
    PlanCase(
        "tp4_to_tp2_dp2",
        "the announcement's second: each source shard crosses the network once, replicas copy it",
        one((8, 4), line("S(0)", 0, 1, 2, 3), Grid((2, 2), "R S(0)", (4, 5, 6, 7))),
        ((4, 5, 6, 7),),
    ),
    PlanCase("fsdp2_to_tp", "rows to fewer rows", one((12, 3), line("S(0)", 0, 1, 2, 3), line("S(0)", 4, 5))),
    PlanCase(
        "fsdp2_to_tp_rowwise", "rows to columns, both uneven", one((7, 5), line("S(0)", 0, 1, 2), line("S(1)", 3, 4))
    ),
    PlanCase(
        "hsdp_to_tp",
        "B06: replicas {0,3},{1,4},{2,5} of uneven rows share the sending",
        one((7, 4), Grid((2, 3), "R S(0)", (0, 1, 2, 3, 4, 5)), line("S(1)", 6, 7)),
    ),
    PlanCase(
        "fsdp2_over_tp_strided",
        "B01: TP cuts first, FSDP inside it, uneven rows",
        one((10, 2), Grid((2, 2), "SS(0,2) S(0)", (0, 1, 2, 3)), line("S(0)", 4, 5, 6)),
    ),
    PlanCase(
        "fsdp2_over_tp_left_to_right",
        "the order that B01 must not have, as a layout of its own",
        one((10, 2), Grid((2, 2), "S(0) S(0)", (0, 1, 2, 3)), line("S(0)", 4, 5, 6)),
    ),
    PlanCase(
        "fsdp2_over_tp_strided_2x3",
        "axes of 2 and 3, 7 rows: rank 5 holds nothing",
        one((7, 3), Grid((2, 3), "SS(0,3) S(0)", (0, 1, 2, 3, 4, 5)), line("S(0)", 6, 7)),
    ),
    PlanCase(
        "tp_outermost_in_rank_order",
        "the mesh runs down its columns; ranks 1 and 2 change places",
        one((10, 3), Grid((2, 2), "SS(0,2) S(0)", (0, 2, 1, 3)), line("S(1)", 4, 5, 6)),
    ),
    PlanCase(
        "fsdp2_over_rowwise",
        "two dims cut by axes of 2 and 3, both uneven",
        one((5, 7), Grid((2, 3), "S(0) S(1)", (0, 1, 2, 3, 4, 5)), line("S(1)", 6, 7)),
        ((6, 7),),
    ),
    PlanCase(
        "uneven_10_over_4",
        "chunks of 3,3,3,1, not 3,3,2,2",
        one((10, 2), line("S(0)", 0, 1, 2, 3), line("S(0)", 4, 5, 6)),
    ),
    PlanCase(
        "axes_3x2_to_2x3",
        "nothing divides anything",
        one((8, 7), Grid((3, 2), "S(0) S(1)", tuple(range(6))), Grid((2, 3), "S(1) S(0)", tuple(range(6, 12)))),
        ((0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11)),
    ),
    PlanCase(
        "empty_trainers",
        "B03: 2,2,1,0 rows, then 2 rows over 4",
        (
            *one((5, 3), line("S(0)", 0, 1, 2, 3), line("S(1)", 4, 5)),
            TensorPair(DOWN.format(0), (2, 3), line("S(0)", 0, 1, 2, 3), line("S(1)", 4, 5)),
        ),
    ),
    PlanCase(
        "empty_engines",
        "two rows over three ranks, and a rank that needs nothing of anything",
        one((2, 5), line("S(0)", 0, 1), line("S(0)", 2, 3, 4)),
        ((2, 3, 4, 5),),
        idle=(5,),
    ),
    PlanCase(
        "replicated_to_sharded",
        "any of three can send every row",
        one((9, 3), line("R", 0, 1, 2), line("S(0)", 3, 4, 5, 6)),
    ),
    PlanCase(
        "sharded_to_replicated",
        "four engines in two domains, each wants all",
        one((9, 3), line("S(0)", 0, 1, 2, 3), line("R", 4, 5, 6, 7)),
        ((4, 5), (6, 7)),
    ),
    PlanCase(
        "whole_experts_to_tp",
        "trainers own experts, engines cut every expert",
        tuple(
            TensorPair(EXPERT.format(0, expert), (6, 4), whole((6, 4), expert // 2), line("S(0)", 3, 4))
            for expert in range(6)
        ),
        ((3, 4),),
    ),
    PlanCase(
        "experts_3_to_2",
        "another number of ranks, five experts: 2,2,1 to 3,2",
        tuple(
            TensorPair(EXPERT.format(0, expert), (4, 3), whole((4, 3), expert // 2), whole((4, 3), 3 + expert // 3))
            for expert in range(5)
        ),
    ),
    PlanCase(
        "stacked_experts_3_to_2",
        "the same as one 3-D tensor, then by rows inside the experts",
        (
            *one((5, 4, 3), line("S(0)", 0, 1, 2), line("S(0)", 3, 4)),
            TensorPair(DOWN.format(0), (5, 4, 3), line("S(0)", 0, 1, 2), line("S(2)", 3, 4)),
        ),
    ),
    PlanCase(
        "expert_and_tensor_parallel",
        "experts over one axis, rows over the other, cut anew on both",
        one((4, 6, 2), Grid((2, 2), "S(0) S(1)", (0, 1, 2, 3)), Grid((2, 2), "S(1) S(0)", (4, 5, 6, 7))),
        ((4, 5), (6, 7)),
    ),
    PlanCase(
        "pipeline_stages_uneven",
        "four layers over three stages: 2,1,1; each tensor lies on one stage only",
        tuple(
            TensorPair(UP.format(layer), (6, 4), line("S(0)", *_STAGES[stage]), line("S(1)", 6, 7))
            for layer, stage in enumerate((0, 0, 1, 2))
        ),
        ((0, 1), (2, 3), (4, 5), (6, 7)),
    ),
    PlanCase(
        "row_to_column_3_to_3",
        "every pair of ranks has a message",
        one((6, 6), line("S(0)", 0, 1, 2), line("S(1)", 3, 4, 5)),
    ),
    PlanCase(
        "column_to_row_2_to_3",
        "no region is contiguous at its sender",
        one((6, 8), line("S(1)", 0, 1), line("S(0)", 2, 3, 4)),
    ),
    PlanCase(
        "one_to_many",
        "one trainer feeds two domains: a relay could halve what it sends",
        one((12, 4), line("R", 0), line("R", 1, 2, 3, 4, 5, 6)),
        ((1, 2, 3), (4, 5, 6)),
    ),
    PlanCase(
        "many_to_one", "one rank takes all; a bucket bounds it", one((12, 4), line("S(0)", 0, 1, 2, 3, 4), line("R", 5))
    ),
    PlanCase("one_to_one", "the smallest world", one((3, 5), line("R", 4), line("S(0)", 9))),
    PlanCase(
        "few_trainers_many_engines",
        "two trainers, six engines of one rank: relays pay",
        one((12, 8), line("S(0)", 0, 1), line("R", 2, 3, 4, 5, 6, 7)),
    ),
    PlanCase(
        "few_trainers_many_domains",
        "two trainers, five engines of four ranks",
        one((16, 8), line("S(0)", 0, 1), Grid((5, 4), "R S(1)", tuple(range(2, 22)))),
        tuple(tuple(range(2 + 4 * engine, 6 + 4 * engine)) for engine in range(5)),
    ),
    PlanCase(
        "tp2_dp3_engines",
        "three engines of two, each a domain, from two trainers of one domain",
        one((8, 6), line("S(0)", 0, 1), Grid((3, 2), "R S(0)", (2, 3, 4, 5, 6, 7))),
        ((0, 1), (2, 3), (4, 5), (6, 7)),
    ),
    PlanCase(
        "many_trainer_replicas",
        "six copies, two receivers: all six send",
        one((12, 3), line("R", 0, 1, 2, 3, 4, 5), line("S(0)", 6, 7)),
    ),
    PlanCase(
        "replicas_near_and_far",
        "replicas lie in the engines' domains and outside: near ones copy, nothing crosses twice",
        one((6, 4), Grid((2, 2), "R S(0)", (0, 1, 2, 3)), line("S(1)", 4, 5, 6, 7)),
        ((0, 4, 5), (1, 6), (2, 3, 7)),
    ),
    PlanCase(
        "mixed_domains",
        "a trainer and an engine in every domain",
        one((9, 4), line("S(0)", 0, 1, 2), line("S(1)", 3, 4, 5)),
        ((0, 3), (1, 4), (2, 5)),
    ),
    PlanCase(
        "colocated",
        "the very same ranks on both sides; diagonals are local copies",
        one((9, 6), line("S(0)", 0, 1, 2), line("S(1)", 0, 1, 2)),
        ((0, 1, 2),),
    ),
    PlanCase(
        "half_colocated",
        "two of four trainers are engines too",
        one((8, 6), line("S(0)", 0, 1, 2, 3), line("S(1)", 2, 3, 4, 5)),
        ((0, 1, 2, 3), (4, 5)),
    ),
    PlanCase(
        "colocated_unchanged",
        "what does not change place stays at home",
        one((8, 2), line("S(0)", 0, 1, 2), line("S(0)", 0, 1, 2)),
    ),
    PlanCase(
        "vectors_and_scalars",
        "one dim, uneven, and none at all",
        (
            TensorPair(UP.format(0), (7,), line("S(0)", 0, 1, 2), line("R", 3, 4)),
            TensorPair(UP.format(1), (), line("R", 0, 1, 2), line("R", 3, 4)),
            TensorPair(UP.format(2), (1,), line("S(0)", 0, 1, 2), line("S(0)", 3, 4)),
        ),
        ((3, 4),),
    ),
    PlanCase(
        "vocabulary_padded_by_trainers",
        "104 rows of which 101 are real; the rest never travels",
        (TensorPair("lm_head.weight", (101, 2), line("S(0)", 0, 1, 2, 3), line("S(0)", 4, 5), source_shape=(104, 2)),),
        ((4, 5),),
    ),
    PlanCase(
        "vocabulary_padded_by_engines",
        "64 rows per rank, of which the last rank has 37 to fill",
        (TensorPair("lm_head.weight", (101, 2), line("S(0)", 0, 1, 2), rows(2, r3=(0, 64), r4=(64, 37))),),
    ),
    PlanCase(
        "kv_head_copies",
        "two heads over four ranks: each head is on two",
        one((6, 4), line("S(0)", 0, 1, 2), Grid((2, 2), "S(0) R", (3, 4, 5, 6))),
        ((3, 4, 5, 6),),
    ),
    PlanCase(
        "gate_and_up_interleaved",
        "two regions per engine rank, cut as packed gate and up",
        one((12, 3), line("S(0)", 0, 1, 2), Grid((2,), "SS(0,2)", (3, 4))),
    ),
    PlanCase(
        "interleaved_trainers",
        "eleven rows in six pieces of two: the last ranks come short",
        one((11, 2), Grid((3,), "SS(0,2)", (0, 1, 2)), Grid((2, 2), "SS(0,2) S(0)", (3, 4, 5, 6))),
    ),
    PlanCase(
        "tiny_buckets",
        "a step holds two elements; every element is a step of its own somewhere",
        one((6, 5), line("S(0)", 0, 1), Grid((2, 2), "R S(1)", (2, 3, 4, 5))),
        ((2, 3, 4, 5),),
        8,
        8,
    ),
    PlanCase(
        "one_large_bucket",
        "all in one step, many tensors per message",
        one((8, 6), line("S(0)", 0, 1), line("S(1)", 2, 3)),
        ((2, 3),),
        1 << 20,
        1 << 20,
    ),
    PlanCase(
        "mixed_dtypes",
        "masters of four bytes to engines of two, beside eight and one",
        (
            TensorPair(UP.format(0), (6, 5), line("S(0)", 0, 1), line("S(1)", 2, 3, 4), "bfloat16", "float32"),
            TensorPair(DOWN.format(0), (6, 5), line("S(1)", 0, 1), line("S(0)", 2, 3, 4), "float64"),
            TensorPair(UP.format(1), (3, 3), line("S(0)", 0, 1), line("R", 2, 3, 4), "float16"),
            TensorPair(DOWN.format(1), (5, 3), line("S(0)", 0, 1), line("S(0)", 2, 3, 4), "uint8"),
        ),
        ((2, 3, 4),),
    ),
    PlanCase(
        "leftovers_beside_the_bulk",
        "route ffn: norms and attention are gathered and broadcast, also from an empty trainer",
        (
            TensorPair(NORM.format(0), (3,), line("S(0)", 0, 1, 2, 3), line("R", 4, 5, 6)),
            TensorPair(
                "model.layers.0.self_attn.o_proj.weight", (5, 6), line("S(0)", 0, 1, 2, 3), line("S(1)", 4, 5, 6)
            ),
            *one((10, 6), line("S(0)", 0, 1, 2, 3), line("S(0)", 4, 5, 6)),
            TensorPair("model.norm.weight", (9,), line("R", 0, 1, 2, 3), line("R", 4, 5, 6), "bfloat16", "float32"),
        ),
        ((4, 5, 6),),
        policy=RoutePolicy.FFN,
        leftovers=(NORM.format(0), "model.layers.0.self_attn.o_proj.weight", "model.norm.weight"),
    ),
    PlanCase(
        "nothing_but_leftovers",
        "route ffn and no feed-forward tensor: an empty direct plan",
        (TensorPair("model.embed_tokens.weight", (11, 3), line("S(0)", 0, 1, 2), line("S(0)", 3, 4)),),
        ((3, 4),),
        policy=RoutePolicy.FFN,
        leftovers=("model.embed_tokens.weight",),
    ),
    PlanCase(
        "numbered_with_gaps_and_backwards",
        "ranks in any order, none of them 0",
        one((7, 4), line("S(0)", 30, 12, 21), Grid((2, 2), "S(0) R", (9, 4, 17, 2))),
        ((4, 17), (2, 9, 12)),
    ),
    PlanCase(
        "needs_of_no_mesh",
        "overlapping boxes, gaps, and two boxes on one rank",
        one(
            (6, 6),
            line("S(0)", 0, 1),
            Boxes(((2, (((1, 1), (3, 4)),)), (3, (((0, 0), (6, 2)), ((2, 4), (3, 2)))), (4, (((2, 2), (2, 2)),)))),
        ),
        ((2, 3, 4),),
    ),
    PlanCase(
        "megatron_to_engines",
        "tensor by pipeline by data parallel trainers, four engines of four ranks: 24 ranks",
        tuple(
            TensorPair(
                UP.format(layer),
                (8, 12),
                Grid((2, 2), "R S(0)", tuple(range(4 * stage, 4 * stage + 4))),
                Grid((4, 4), "R S(1)", tuple(range(8, 24))),
            )
            for layer, stage in enumerate((0, 0, 0, 1))
        ),
        (tuple(range(8)), *_WIDE_ENGINES),
    ),
    PlanCase(
        "fsdp8_to_tp4_dp4",
        "the widest world of all to all",
        one((24, 8), line("S(0)", *range(8)), Grid((4, 4), "R S(0)", tuple(range(8, 24)))),
        ((0, 1, 2, 3), (4, 5, 6, 7), *_WIDE_ENGINES),
    ),
)


LARGE_PAIRS: tuple[PlanCase, ...] = (
    PlanCase(
        "large_one_to_seven",
        "4 MiB a tensor, large enough to be shared out: one trainer, seven engines that can pass on",
        one((256, 2048), line("R", 0), line("R", *range(1, 8)), dtype="float64"),
        (),
        1 << 20,
        1 << 18,
    ),
    PlanCase(
        "large_two_to_three_domains",
        "two trainers, three engines of two",
        one((256, 2048), line("S(0)", 0, 1), Grid((3, 2), "R S(1)", tuple(range(2, 8))), dtype="float64"),
        ((0, 1), (2, 3), (4, 5), (6, 7)),
        1 << 20,
        1 << 18,
    ),
    PlanCase(
        "large_two_to_five_domains",
        "two trainers, five engines of four that share what enters",
        one((128, 2048), line("S(0)", 0, 1), Grid((5, 4), "R R", tuple(range(2, 22))), dtype="float64"),
        tuple(tuple(range(2 + 4 * engine, 6 + 4 * engine)) for engine in range(5)),
        1 << 20,
        1 << 18,
    ),
    PlanCase(
        "large_replicas_uneven",
        "three copies of uneven columns; one engine's domain holds a copy, the other's none",
        one((300, 1001), Grid((3, 2), "R S(1)", tuple(range(6))), line("S(0)", 6, 7), dtype="float64"),
        ((0, 1, 6), (2, 3), (4, 5)),
        1 << 19,
        1 << 17,
    ),
)
"""Tensors of megabytes: planners share, stripe and relay only what is worth it."""


def plan_case(name: str) -> PlanCase:
    """The case of this name. Raises KeyError for another."""
    return {case.name: case for case in (*LAYOUT_MATRIX, *LARGE_PAIRS)}[name]
