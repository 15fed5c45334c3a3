"""Do the two sides speak of the same tensors? Checked before any byte moves, all faults in one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nemo_rl_reshard.errors import DeclarationError, FaultList
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.classify import ClassKind, classify, draft_layers

_INTEGERS = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64"})


def check_match(
    source: Catalog,
    target: Catalog,
    skipped: Mapping[str, str] | Sequence[str] | None = None,
    padded: Mapping[str, tuple[int, ...]] | None = None,
    colocated: bool = False,
) -> None:
    """Raise one DeclarationError listing every way in which the two catalogs do not fit.

    `skipped` are source tensors that the target rightly lacks; None stands for `allowed_skips`. `padded` gives the
    true shape of tensors that the trainers hold with padding at the end of dims (a vocabulary of 101 rows kept as
    104): such a tensor may be larger at the source, and the rest never travels. Ranks on both sides are refused unless
    `colocated`.
    """
    faults = FaultList("matching trainer and inference declarations", DeclarationError)
    padded = padded or {}
    if skipped is None:
        skipped = allowed_skips(source, target)
    only_source = [name for name in source.specs if name not in target.specs and name not in skipped]
    only_target = [name for name in target.specs if name not in source.specs]
    if only_source or only_target:
        faults.add(
            f"names differ; only trainers declare {sorted(only_source)}, only inference declares "
            f"{sorted(only_target)}; "
            "map the names to the engine's checkpoint names or declare them skipped"
        )
    both = sorted(set(source.ranks) & set(target.ranks))
    if both and not colocated:
        faults.add(f"ranks {both} are on both sides; number the sides apart or declare the refit colocated")
    for name, wanted in target.specs.items():
        given = source.specs.get(name)
        if given is None:
            continue
        true_shape = padded.get(name)
        if true_shape is not None and wanted.shape != true_shape:
            faults.add(f"{name}: inference wants shape {wanted.shape}, the declared true shape is {true_shape}")
        elif given.shape != wanted.shape and not (true_shape is not None and _is_padding(given.shape, wanted.shape)):
            faults.add(_shape_fault(name, source, target))
        if (given.dtype in _INTEGERS or wanted.dtype in _INTEGERS) and given.dtype != wanted.dtype:
            faults.add(f"{name}: trainers hold {given.dtype}, inference wants {wanted.dtype}; only floats are cast")
        if name not in target.indirect and not target.layouts[name].held and 0 not in wanted.shape:
            faults.add(f"{name}: no inference rank needs any element, and none calls it indirect")
    faults.raise_if_any()


def allowed_skips(source: Catalog, target: Catalog, architecture: str | None = None) -> dict[str, str]:
    """Source tensors that an engine may rightly lack, with the reason: adapters, and draft layers with no drafter.

    Their number belongs in the report.
    """
    missing = [name for name in source.specs if name not in target.specs]
    drafts = draft_layers(source.specs)
    skips: dict[str, str] = {}
    for name in missing:
        found = classify(name, architecture, drafts)
        if found.kind is ClassKind.ADAPTER:
            skips[name] = found.reason
        elif found.reason.startswith("draft"):
            skips[name] = "draft (MTP) layer, and the engine has no drafter"
    return skips


def _is_padding(padded: tuple[int, ...], true: tuple[int, ...]) -> bool:
    """True when `padded` differs from `true` only by more elements at the end of dims."""
    return len(padded) == len(true) and all(a >= b for a, b in zip(padded, true, strict=True))


def _shape_fault(name: str, source: Catalog, target: Catalog) -> str:
    """A shape mismatch, with the likely cause when a trainer rank holds the whole of its smaller shape."""
    given, wanted = source.specs[name].shape, target.specs[name].shape
    layout = source.layouts[name]
    whole = Region.whole(given)
    holders = [rank for rank, regions in layout.held if whole in regions]
    text = f"{name}: trainer ranks {list(layout.ranks)} declare shape {given}, inference wants {wanted}"
    if holders and len(given) == len(wanted) and all(a <= b for a, b in zip(given, wanted, strict=True)):
        return f"{text}; ranks {holders} give a plain tensor as the whole, likely one shard: declare its placement"
    if _is_padding(given, wanted):
        return f"{text}; if the trainers pad it, declare the true shape"
    return f"{text}; both must give the checkpoint's shape"
