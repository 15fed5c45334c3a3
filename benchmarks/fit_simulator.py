"""Fit the simulator's constants to the published refit times, and say how well it then tells each of them.

    python benchmarks/fit_simulator.py            # the table, the constants, and whether the package holds them
    python benchmarks/fit_simulator.py --json fit.json

Least squares on the logarithm of predicted over published time, over all constants at once, one set for every row.
Where rows say nothing about a constant it stays where it started: its logarithm is held to `STARTING` with a tenth of
a row's weight. "left out" is what the simulator says about a row when the fit has never seen it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_reshard.cli.hf_model import read_model
from nemo_rl_reshard.simulate.baselines import gather_broadcast, published
from nemo_rl_reshard.simulate.constants import FITTED, STARTING, Constants
from nemo_rl_reshard.simulate.published import CHECKS, FITTED_ROWS, ROWS, Design, PublishedRow
from nemo_rl_reshard.virtual.model import ModelShape

HOLD = 0.1
NAMES = tuple(field.name for field in fields(Constants))
START = np.log([getattr(STARTING, name) for name in NAMES])

GUESSED = next(row for row in ROWS if row not in FITTED_ROWS)

Predict = Callable[[Constants], float]


def predictor(row: PublishedRow, model: ModelShape) -> Predict:
    """Constants -> seconds of the row's design; the layouts are looked at once."""
    source, target, topology = row.layout.sides(model)
    if row.design is Design.RESHARD:
        bulk = published.measure(source, target, topology, model.architecture)
        return lambda constants: published.simulate_load(bulk, constants).seconds
    names = [name for name in target.specs if name in source.layouts]
    load = gather_broadcast.measure(names, source, target, topology)
    return lambda constants: gather_broadcast.simulate_load(load, constants).seconds


def constants_at(point: np.ndarray) -> Constants:
    values = dict(zip(NAMES, np.exp(point).tolist(), strict=True))
    values["collective_fraction"] = min(values["collective_fraction"], 1.0)
    return Constants(**values)


def residuals(point: np.ndarray, rows: Sequence[tuple[PublishedRow, Predict]]) -> np.ndarray:
    constants = constants_at(point)
    errors = [np.log(predict(constants) / row.seconds) for row, predict in rows]
    return np.concatenate([errors, HOLD * (point - START)])


def fit(rows: Sequence[tuple[PublishedRow, Predict]]) -> np.ndarray:
    """Levenberg-Marquardt from `START`, derivatives by differences."""
    point, damping = START.copy(), 1e-2
    now = residuals(point, rows)
    for _ in range(100):
        slopes = np.stack([(residuals(point + 1e-4 * unit, rows) - now) / 1e-4 for unit in np.eye(len(point))], axis=1)
        for _ in range(12):
            step = -np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(point)), slopes.T @ now)
            step = np.clip(step, -0.5, 0.5)
            after = residuals(point + step, rows)
            if after @ after < now @ now:
                break
            damping *= 4
        else:
            break
        point, now, damping = point + step, after, damping / 3
        if np.abs(step).max() < 1e-6:
            break
    return point


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write rows and constants there")
    options = parser.parse_args()
    began = time.perf_counter()
    models = {row.model: read_model({"preset": row.model}) for row in (*ROWS, *CHECKS)}
    predictors = {row: predictor(row, models[row.model]) for row in (*ROWS, *CHECKS)}
    fitted = [(row, predictors[row]) for row in FITTED_ROWS]
    constants = constants_at(fit(fitted))
    without = {row: constants_at(fit([pair for pair in fitted if pair[0] is not row])) for row in FITTED_ROWS}

    table = [report(row, predictors[row], constants, without.get(row, constants)) for row in ROWS]
    checks = [report(row, predictors[row], constants, constants) for row in CHECKS]
    print_rows("published rows", table)
    print_medians(table)
    print_rows("\nrows that the fit never sees", checks)
    print_layouts()
    print_guesses(models[GUESSED.model], constants)
    print_constants(constants, list(without.values()))
    if options.json is not None:
        options.json.write_text(json.dumps({"constants": asdict(constants), "rows": table, "checks": checks}, indent=1))
    print(f"\n{time.perf_counter() - began:.0f} s: python benchmarks/fit_simulator.py")
    if any(abs(getattr(FITTED, name) / getattr(constants, name) - 1) > 0.01 for name in NAMES):
        sys.exit("the constants in nemo_rl_reshard/simulate/constants.py are not this fit: change FITTED there")


def report(row: PublishedRow, predict: Predict, constants: Constants, without: Constants) -> dict[str, Any]:
    seconds, left_out = predict(constants), predict(without)
    return {
        "row": row.name,
        "design": str(row.design),
        "gpus": f"{row.layout.trainers} + {row.layout.engines}",
        "basis": str(row.layout.basis),
        "published": [row.low_s, row.high_s],
        "predicted": seconds,
        "error": seconds / row.seconds - 1,
        "left_out_error": left_out / row.seconds - 1,
        "in_fit": row in FITTED_ROWS,
        "source": row.source,
    }


def print_rows(title: str, table: Sequence[dict[str, Any]]) -> None:
    line = "  {:22}{:40}{:12}{:9}{:>13}{:>11}{:>8}{:>11}"
    print(title)
    print(line.format("design", "row", "GPUs", "basis", "published s", "predicted", "error", "left out"))
    for row in table:
        low, high = row["published"]
        told = f"{low:g}" if low == high else f"{low:.2f} - {high:.2f}"
        left_out = f"{row['left_out_error']:+.0%}" if row["in_fit"] else "not fitted"
        print(
            line.format(
                *(row[key] for key in ("design", "row", "gpus", "basis")),
                *(told, f"{row['predicted']:.2f}", f"{row['error']:+.0%}", left_out),
            )
        )


def print_medians(table: Sequence[dict[str, Any]]) -> None:
    for name, key in (("error", "error"), ("error with the row left out of the fit", "left_out_error")):
        errors = np.abs([row[key] for row in table])
        print(f"  {name}: median {np.median(errors):.1%}, largest {errors.max():.0%}")


def print_layouts() -> None:
    print("\nwhere layouts and GPU counts come from")
    for row in {(row.name, row.layout): row for row in ROWS}.values():
        print(f"  {row.name}: {row.layout.basis}: {row.layout.note}")


def print_guesses(model: ModelShape, constants: Constants) -> None:
    """The layout of one row is a guess altogether: what the simulator says with fewer and with more trainers."""
    print(f"\n{GUESSED.name}, published {GUESSED.seconds:g} s, by the number of trainers that is guessed")
    for factor in (0.5, 1, 2):
        trainers, ep = (int(number * factor) for number in (GUESSED.layout.trainers, GUESSED.layout.source_ep))
        row = replace(GUESSED, layout=replace(GUESSED.layout, trainers=trainers, source_ep=ep))
        print(f"  {trainers:5} as PP16 x EP{ep}: {predictor(row, model)(constants):.2f} s")


def print_constants(constants: Constants, others: Sequence[Constants]) -> None:
    print("\nconstants: fit, range over the fits with a row left out, where the fit started")
    for name in NAMES:
        spread = [getattr(other, name) for other in others]
        print(
            f"  {name:22}{getattr(constants, name):12.4g}{min(spread):12.4g} to {max(spread):<12.4g}"
            f"{getattr(STARTING, name):12.4g}"
        )


if __name__ == "__main__":
    main()
