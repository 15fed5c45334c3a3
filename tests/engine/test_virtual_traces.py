"""vLLM on paper against vLLM: region by region what its own loaders take, on every rank of many layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from equipment.engine_scripts import run_cases
from equipment.virtual_cases import CASES, TraceCase, model_of

from nemo_rl_reshard.virtual.vllm import vllm_target

pytest.importorskip("vllm", exc_type=ImportError)

# The first test waits for the traces of all cases.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[1] / "equipment" / "virtual_traces.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("virtual")


@pytest.fixture(scope="module")
def traces(folder: Path) -> dict[str, dict[str, Any]]:
    found, complaint = run_cases(SCRIPT, folder, live=False, timeout_s=500)
    assert len(found) == len(CASES), complaint
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rank_needs_what_its_loader_takes_b24_b25_b30_b35(
    case: TraceCase, folder: Path, traces: dict[str, dict[str, Any]]
) -> None:
    """B24, B25, B30, B35: fused halves, experts cut or dealt, copied heads, padded vocabularies; also the dtypes."""
    found = traces[case.name]
    assert "error" not in found, found["error"]
    model = model_of(folder, case)
    catalog = vllm_target(model, world=case.world, tp=case.tp, dp=case.dp, ep=case.ep, pp=case.pp, first_rank=0)
    wrong = []
    reasons: dict[str, str] = {}
    for rank, taken in enumerate(found["ranks"]):
        reasons |= taken["indirect"]
        for spec in model.specs:
            ruled = sorted([list(r.offset), list(r.extent)] for r in catalog.layouts[spec.name].regions_of(rank))
            if ruled != sorted(taken["regions"][spec.name]):
                wrong.append(f"rank {rank}: {spec.name} {spec.shape}: {ruled}, taken {taken['regions'][spec.name]}")
            if taken["dtypes"].get(spec.name, catalog.specs[spec.name].dtype) != catalog.specs[spec.name].dtype:
                wrong.append(f"rank {rank}: {spec.name}: {catalog.specs[spec.name].dtype}, taken {taken['dtypes']}")
    assert not wrong, "\n".join(wrong[:20])
    assert set(catalog.indirect) == set(reasons)
