"""`plan --sweep`: plan the same refit for many layouts and rank them: which one refits fastest?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product, takewhile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nemo_rl_reshard.cli.quantities import bytes_text, seconds_text
from nemo_rl_reshard.cli.refit_spec import RefitSpec, faults_in, held_bytes
from nemo_rl_reshard.cli.spec_fields import Fields
from nemo_rl_reshard.cli.spec_model import model_of, parse_model_spec
from nemo_rl_reshard.cli.spec_text import read_plain
from nemo_rl_reshard.cli.stable_json import write_json
from nemo_rl_reshard.errors import ConfigError, FaultList
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.simulate.statistics import statistics
from nemo_rl_reshard.topology import MACHINES
from nemo_rl_reshard.virtual.model import ModelShape

AUTO = "auto"
_SHOWN = 24

Layout = tuple[dict[str, dict[str, Any]], RefitSpec]
"""Both sides as a spec gives them, and what that is read into."""


@dataclass(frozen=True)
class Row:
    """One layout and what its plan comes to. `weights_bytes` is the most that an inference rank holds."""

    sides: Mapping[str, Mapping[str, Any]]
    source: str
    target: str
    predicted: Mapping[str, Any]
    totals: Mapping[str, int]
    weights_bytes: int
    is_given: bool

    def to_plain(self) -> dict[str, Any]:
        """JSON types only."""
        kept = ("seconds", "floor_seconds", "bottleneck", "floor_bottleneck")
        return {
            **{side: dict(sizes) for side, sizes in self.sides.items()},
            "as_given": self.is_given,
            **{key: self.predicted[key] for key in kept},
            **{key: self.totals[key] for key in ("network_bytes", "fast_bytes", "leftover_bytes")},
            "weights_bytes": self.weights_bytes,
        }


def run_sweep(spec_file: Path, layouts: str, json_file: Path | None, picture: Path | None, console: Console) -> None:
    """Rank the layouts of `layouts`, a file or `auto`; the spec's own layout is always among them.

    Raises ConfigError, listing every fault of the spec or of the file, before anything is written.
    """
    plain, repeated = read_plain(spec_file)
    if not isinstance(plain, dict) or "model" not in plain:
        raise ConfigError(f"{spec_file}: --sweep needs a spec by model; explicit tensors have one layout each")
    faults = FaultList(str(spec_file), ConfigError)
    faults.extend(repeated)
    given = parse_model_spec(plain, faults, spec_file.parent)
    model = model_of(plain, spec_file.parent)
    refused: Counter[str] = Counter()
    candidates: Iterable[Layout]
    if layouts == AUTO:
        candidates = _fitting(plain, _every_target(plain["target"], model), model, spec_file.parent, refused)
    else:
        candidates = _listed(plain, Path(layouts), model, spec_file.parent)
    rows: dict[tuple[str, ...], Row] = {}
    with console.status("planning") as status:
        for sides, spec in chain([(_sides(plain), given)], candidates):
            assert spec.described is not None
            key = (spec.described.source, spec.described.target, str(sides["source"].get("stages")))
            if key not in rows:
                status.update(f"planning {spec.described.target}")
                rows[key] = _row(sides, spec, is_given=spec is given)
    ranked = sorted(rows.values(), key=lambda row: (row.predicted["seconds"], row.source, row.target))
    if json_file is not None:
        plain_rows = [row.to_plain() for row in ranked]
        write_json(json_file, {"schema": 1, "model": model.name, "rows": plain_rows, "refused": dict(refused)})
    if picture is not None:
        from nemo_rl_reshard.cli.sweep_plot import draw_sweep

        draw_sweep(ranked, given, picture)
    _print(ranked, refused, given, console)


def _row(sides: Mapping[str, Mapping[str, Any]], spec: RefitSpec, *, is_given: bool) -> Row:
    plan = make_plan(spec.source, spec.target, spec.routes, spec.topology, spec.options)
    summary = statistics(plan, spec.source, spec.target, spec.topology)
    assert spec.described is not None
    return Row(
        sides,
        spec.described.source,
        spec.described.target,
        summary["predicted"],
        summary["totals"],
        max(held_bytes(spec.target).values(), default=0),
        is_given,
    )


def _sides(plain: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {side: dict(plain[side]) for side in ("source", "target")}


def _listed(plain: dict[str, Any], path: Path, model: ModelShape, folder: Path) -> list[Layout]:
    """The layouts that a file lists: every source with every target. Raises ConfigError listing every fault."""
    content, repeated = read_plain(path)
    faults = FaultList(str(path), ConfigError)
    faults.extend(repeated)
    if isinstance(content, dict) and isinstance(content.get("sweep"), dict):
        content = content["sweep"]
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{path}: must be a mapping with lists of sizes under source or target; got {content!r}")
    Fields(content, "", faults, ("source", "target"))
    options: dict[str, list[dict[str, Any]]] = {}
    for side in ("source", "target"):
        entries = content.get(side, [{}])
        if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
            faults.add(f"{side}: must be a list of mappings like {{tp: 8, dp: 4}}; got {entries!r}")
            entries = []
        options[side] = [_sized(plain[side], entry) if entry else dict(plain[side]) for entry in entries]
    found = []
    for index, (source, target) in enumerate(product(options["source"], options["target"])):
        sides = {"source": source, "target": target}
        try:
            found.append((sides, parse_model_spec({**plain, **sides}, FaultList("", ConfigError), folder, model)))
        except ConfigError as fault:
            faults.extend(f"layout {index + 1}: {text}" for text in faults_in(fault))
    faults.raise_if_any()
    return found


def _sized(given: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The side with other sizes: only its backend and world stay, so that sizes left out have their defaults."""
    return {"backend": given["backend"], "world": given["world"], **sizes}


def _every_target(given: Mapping[str, Any], model: ModelShape) -> Iterator[dict[str, Any]]:
    """Every tp x dp that multiplies to the world, experts whole or cut, over one engine's ranks or over all.

    Pipeline stages stay as given.
    """
    stages = given.get("pp", 1)
    ranks = given["world"] // stages
    has_experts = any(".experts." in spec.name for spec in model.specs)
    for tp in (size for size in range(1, ranks + 1) if ranks % size == 0):
        for ep in sorted({1, tp, ranks} if has_experts else {1}):
            sizes = {"tp": tp, "dp": ranks // tp, "ep": ep, "pp": stages}
            yield _sized(given, {key: size for key, size in sizes.items() if size > 1 or key == "tp"})


def _fitting(
    plain: dict[str, Any],
    targets: Iterator[dict[str, Any]],
    model: ModelShape,
    folder: Path,
    refused: Counter[str],
) -> Iterator[Layout]:
    """The targets that the model can be laid out for and whose weights fit; why others are not is counted."""
    topology = plain.get("topology")
    machine = MACHINES.get(str(topology.get("preset"))) if isinstance(topology, dict) else None
    for target in targets:
        sides = {"source": dict(plain["source"]), "target": target}
        try:
            spec = parse_model_spec({**plain, "target": target}, FaultList("", ConfigError), folder, model)
        except ConfigError as fault:
            refused[faults_in(fault)[0]] += 1
            continue
        if machine is not None and max(held_bytes(spec.target).values(), default=0) > machine.device_bytes:
            refused[f"weights of a rank are more than the {bytes_text(machine.device_bytes)} of its device"] += 1
            continue
        yield sides, spec


def short_names(texts: Sequence[str]) -> tuple[list[str], str]:
    """Texts of sides without the words that all of them start or end with, and those words; one text stays as it is."""
    split = [text.split() for text in texts]
    if len(set(texts)) < 2:
        return list(texts), ""
    head = _common_start(split)
    tail = _common_start([words[len(head) :][::-1] for words in split])[::-1]
    names = [" ".join(words[len(head) : len(words) - len(tail)]) for words in split]
    return names, " ".join([*head, *tail])


def _common_start(texts: Sequence[Sequence[str]]) -> list[str]:
    """The words that all texts start with."""
    return [words[0] for words in takewhile(lambda words: len(set(words)) == 1, zip(*texts, strict=False))]


def _print(rows: Sequence[Row], refused: Mapping[str, int], given: RefitSpec, console: Console) -> None:
    assert given.described is not None
    targets, engines = short_names([row.target for row in rows])
    sources, trainers = short_names([row.source for row in rows])
    varies = len(set(sources)) > 1
    heading = (
        f"{given.described.model}: {trainers or sources[0]} -> {engines or targets[0]}, {given.described.topology}"
    )
    console.print(heading, style="bold", markup=False, highlight=False, soft_wrap=True)
    table = Table(title="which layout refits fastest", title_justify="left", header_style="bold")
    for name in ("", *(["trainers"] if varies else []), "engines"):
        table.add_column(name)
    for name in ("predicted", "floor", "over it", "network", "weights"):
        table.add_column(name, justify="right")
    for place, row in enumerate(rows, start=1):
        if place > _SHOWN and not row.is_given:
            continue
        seconds, floor = row.predicted["seconds"], row.predicted["floor_seconds"]
        table.add_row(
            f"{place} *" if row.is_given else str(place),
            *([sources[place - 1]] if varies else []),
            targets[place - 1],
            seconds_text(seconds),
            seconds_text(floor),
            f"{seconds / floor:.2f}x" if floor else "-",
            bytes_text(row.totals["network_bytes"]),
            bytes_text(row.weights_bytes),
            style="bold" if row.is_given else "",
        )
    more = f"; {len(rows)} layouts, --json has them all" if len(rows) > _SHOWN else ""
    table.caption = f"* as the spec gives it; weights: at most, of an inference rank{more}"
    table.caption_justify = "left"
    console.print(table, markup=False)
    console.print(f"the fastest waits for: {rows[0].predicted['bottleneck']}", highlight=False)
    for reason, count in refused.items():
        console.print(f"left out {count}: {reason}", style="dim", markup=False, highlight=False, soft_wrap=True)
