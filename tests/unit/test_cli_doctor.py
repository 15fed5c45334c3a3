"""`doctor`: findings, abilities, exit codes 0, 2 and 3, and the placeholder package told from the real NeMo RL."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
from equipment.command import Command

from nemo_rl_reshard.cli import requirements
from nemo_rl_reshard.cli.requirements import Finding


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, capsys, monkeypatch)


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make things look missing."""
    probes = dict(requirements.PROBES)
    for name in names:
        probes[name] = lambda name=name: Finding(name, "tests", False, remedy=f"get {name}")
    for module in ("nemo_rl_reshard.cli.requirements", "nemo_rl_reshard.cli.doctor"):
        monkeypatch.setattr(f"{module}.PROBES", probes)


def test_says_what_is_here_and_what_it_can_do(command: Command) -> None:
    ended = command("doctor", "--json", "doctor.json", "--require", "torch", "--require", "gloo")
    assert (ended.code, ended.err) == (0, "")
    plain = json.loads((command.folder / "doctor.json").read_text())
    found = {finding["name"]: finding for finding in plain["findings"]}
    assert found["torch"]["version"] == metadata.version("torch")
    assert found["gloo"]["present"]
    can = {ability["what"]: ability["lacks"] for ability in plain["abilities"]}
    assert can["plan a refit (plan)"] == []
    assert "can    check and time one" in ended.out


def test_what_is_required_and_missing_exits_3_and_says_how_to_get_it(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "vllm", "ray")
    ended = command("doctor", "--require", "vllm", "--require", "torch", "--require", "ray")
    assert ended.code == 3
    assert [fault.split(":")[0] for fault in ended.faults] == ["vllm", "ray"]
    assert "get vllm" in ended.faults[0]
    # The findings are printed all the same: that is what one asks a doctor for.
    assert "trace an engine's loader (trace): lacks vllm" in ended.out


def test_missing_things_that_nobody_requires_are_no_failure(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "vllm")
    assert command("doctor").code == 0


def test_an_unknown_requirement_exits_2_with_the_nearest_name(command: Command) -> None:
    ended = command("doctor", "--require", "vlm", "--require", "nemo_rl")
    assert ended.code == 2
    assert len(ended.faults) == 2
    assert "'vllm'" in ended.faults[0]
    assert "'nemo-rl'" in ended.faults[1]


@pytest.mark.parametrize(("version", "remark"), [("0.0.0", "placeholder"), (None, "")])
def test_the_placeholder_under_nemo_rls_name_is_not_nemo_rl(
    monkeypatch: pytest.MonkeyPatch, version: str | None, remark: str
) -> None:
    monkeypatch.setattr(requirements, "_version", lambda *names: version)
    monkeypatch.setattr(requirements.util, "find_spec", lambda name: object() if version else None)
    finding = requirements.PROBES["nemo-rl"]()
    assert not finding.present
    assert remark in finding.note
    assert "source" in finding.remedy


@pytest.mark.parametrize(("version", "is_supported"), [("0.32.0", True), ("0.320.1", False), ("0.25.0", False)])
def test_another_vllm_than_the_tested_one_is_remarked_on(
    monkeypatch: pytest.MonkeyPatch, version: str, is_supported: bool
) -> None:
    monkeypatch.setattr(requirements, "_version", lambda *names: version)
    monkeypatch.setattr(requirements.util, "find_spec", lambda name: object())
    finding = requirements.PROBES["vllm"]()
    assert finding.present
    assert (finding.note == "") is is_supported


def test_a_command_that_lacks_something_exits_3(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "matplotlib")
    ended = command("compare", "somewhere")
    assert ended.code == 3
    assert "matplotlib" in ended.err
