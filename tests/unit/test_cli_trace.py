"""`trace` without an engine: reading checkpoint headers, boxes of parameters, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from equipment.command import Command
from safetensors.torch import save_file

from nemo_rl_reshard.cli.run_trace import parameter_box, read_checkpoint_specs
from nemo_rl_reshard.params.shard import StorageView
from nemo_rl_reshard.params.spec import TensorSpec


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, capsys, monkeypatch)


def test_reads_names_shapes_and_dtypes_from_headers_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(3, 2, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors", {"format": "pt"})
    save_file({"b": torch.zeros((), dtype=torch.float32)}, tmp_path / "model-2.safetensors")
    assert read_checkpoint_specs(tmp_path) == [TensorSpec("a", (3, 2), "bfloat16"), TensorSpec("b", (), "float32")]


@pytest.mark.parametrize("missing", ["everything", "weights", "header"])
def test_what_is_no_checkpoint_exits_2_before_any_engine_starts(command: Command, missing: str) -> None:
    folder = command.folder / "model"
    folder.mkdir()
    if missing != "everything":
        (folder / "config.json").write_text(json.dumps({}))
    if missing == "header":
        (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 not a header ")
    ended = command("trace", folder, "--tp", "2")
    assert ended.code == 2
    assert str(folder) in ended.err


@pytest.mark.parametrize(
    ("view", "box"),
    [
        # rows 2-3 of a [4, 3] parameter, whole rows
        (lambda whole: whole[2:4], [[2, 4], [0, 3]]),
        # a column block
        (lambda whole: whole[:, 1:3], [[0, 4], [1, 3]]),
        # a transposed tensor: its dims are the parameter's in the other order
        (lambda whole: whole[1:3, 0:2].t(), [[1, 3], [0, 2]]),
        # one element
        (lambda whole: whole[3:4, 2:3], [[3, 4], [2, 3]]),
    ],
)
def test_a_view_of_a_parameter_as_a_box(view, box: list[list[int]]) -> None:
    whole = torch.arange(12).view(4, 3)
    part = view(whole)
    found = StorageView("w", part.storage_offset(), tuple(part.shape), part.stride())
    assert parameter_box(found, whole.stride()) == box


def test_an_expert_is_a_box_of_one_in_the_first_dim() -> None:
    stacked = torch.zeros(5, 4, 3)
    part = stacked[2, 1:3]
    found = StorageView("w13", part.storage_offset(), tuple(part.shape), part.stride())
    assert parameter_box(found, stacked.stride()) == [[2, 3], [1, 3], [0, 3]]
