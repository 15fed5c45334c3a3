"""`trace` on a real engine: the boxes it prints are where the loader really puts values."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from equipment.tiny_qwen import tiny
from transformers import Qwen3Config, Qwen3ForCausalLM

HIDDEN, INNER, VOCABULARY = 64, 96, 100


@pytest.fixture(scope="module")
def landings(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trace")
    fields = tiny(vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1)
    Qwen3ForCausalLM(Qwen3Config(**fields, dtype="float32")).save_pretrained(folder / "model")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "nemo_rl_reshard.cli.app",
            "trace",
            folder / "model",
            "--tp",
            "2",
            "--json",
            folder / "trace.json",
        ],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "[0:48, 0:64] -> model.layers.0.mlp.gate_up_proj.weight [0:48, 0:64]  (" in done.stdout
    return json.loads((folder / "trace.json").read_text())["landings"]


def of(landings: list[dict[str, Any]], tensor: str) -> list[tuple[int, Any, Any]]:
    found = [row for row in landings if row["tensor"] == tensor]
    return sorted((row["rank"], row["region"], row["box"]) for row in found)


@pytest.mark.engine
def test_gate_and_up_share_a_parameter_gate_first(landings: list[dict[str, Any]]) -> None:
    half = INNER // 2
    for tensor, start in (("gate_proj", 0), ("up_proj", half)):
        assert of(landings, f"model.layers.0.mlp.{tensor}.weight") == [
            (0, [[0, half], [0, HIDDEN]], [[start, start + half], [0, HIDDEN]]),
            (1, [[half, INNER], [0, HIDDEN]], [[start, start + half], [0, HIDDEN]]),
        ]


@pytest.mark.engine
def test_row_parallel_weights_are_cut_by_columns(landings: list[dict[str, Any]]) -> None:
    half = INNER // 2
    assert of(landings, "model.layers.0.mlp.down_proj.weight") == [
        (0, [[0, HIDDEN], [0, half]], [[0, HIDDEN], [0, half]]),
        (1, [[0, HIDDEN], [half, INNER]], [[0, HIDDEN], [0, half]]),
    ]


@pytest.mark.engine
def test_vocabulary_is_cut_where_the_padded_one_is(landings: list[dict[str, Any]]) -> None:
    """B35: 100 rows padded to 128: rank 0 has 64, rank 1 the other 36 and 28 rows that never travel."""
    assert of(landings, "lm_head.weight") == [
        (0, [[0, 64], [0, HIDDEN]], [[0, 64], [0, HIDDEN]]),
        (1, [[64, VOCABULARY], [0, HIDDEN]], [[0, 36], [0, HIDDEN]]),
    ]
