"""`doctor`: findings, abilities, exit codes 0, 2 and 3, and the placeholder package told from the real NeMo RL."""

from __future__ import annotations

import json
import sys
import tomllib
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from equipment.command import Command
from packaging.requirements import Requirement

from nemo_rl_reshard.cli import nemo_rl_probe, requirements
from nemo_rl_reshard.cli.requirements import Finding
from nemo_rl_reshard.integrations.nemo_rl.compatibility import table
from nemo_rl_reshard.integrations.nemo_rl.upstream import SYMBOLS


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


def nemo_rl_on_path(
    monkeypatch: pytest.MonkeyPatch, folder: Path, version: tuple[int, int, int], *content: str
) -> Finding:
    """Put a package of NeMo RL's name first on the path, which nothing may import, and look for it."""
    package = folder / "nemo_rl"
    for name in ("__init__.py", *content):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("raise AssertionError('looked at, not imported')\n")
    numbers = "\n".join(f"{name} = {value}" for name, value in zip(("MAJOR", "MINOR", "PATCH"), version, strict=True))
    (package / "package_info.py").write_text(
        f'{numbers}\nPRE_RELEASE = ""\nVERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)\n'
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "nemo_rl", raising=False)
    return requirements.PROBES["nemo-rl"]()


REAL = ("algorithms/grpo.py", "weight_sync/interfaces.py")


@pytest.mark.parametrize("content", [(), REAL[:1]], ids=["as it is on the index", "half of it"])
def test_the_placeholder_under_nemo_rls_name_is_told_by_what_it_contains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: tuple[str, ...]
) -> None:
    """The package of the index consists of `__init__.py` and `package_info.py`, and its import succeeds."""
    finding = nemo_rl_on_path(monkeypatch, tmp_path, (0, 0, 0), *content)
    assert (finding.present, finding.version) == (False, "0.0.0")
    assert f"{tmp_path / 'nemo_rl'} is the empty package" in finding.note
    assert finding.remedy.startswith("pip uninstall nemo-rl, then install NeMo RL from its source repository")


@pytest.mark.parametrize(("version", "is_tested"), [((0, 6, 0), True), ((0, 5, 9), False), ((0, 60, 0), False)])
def test_a_checkout_of_nemo_rl_counts_without_being_installed_or_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: tuple[int, int, int], is_tested: bool
) -> None:
    finding = nemo_rl_on_path(monkeypatch, tmp_path, version, *REAL)
    assert (finding.present, finding.version) == (True, ".".join(map(str, version)))
    assert ("tested on 0.6" in finding.note) is not is_tested


def test_names_that_the_plugin_touches_and_this_nemo_rl_lacks_are_remarked_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Read from the source: trainers' modules import only where trainers run."""
    first, second, *others = (symbol for symbol in SYMBOLS if symbol.module == "nemo_rl.weight_sync.interfaces")
    finding = nemo_rl_on_path(monkeypatch, tmp_path, (0, 6, 0), *REAL)
    assert first.name in finding.note
    method = first.name.partition(".")[2]
    source = f"class WeightSynchronizer:\n    def {method}(self): ...\n"
    (tmp_path / "nemo_rl" / "weight_sync" / "interfaces.py").write_text(source)
    note = requirements.PROBES["nemo-rl"]().note
    assert first.name not in note
    assert all(symbol.name in note for symbol in (second, *others))


def test_a_checkout_wins_over_the_placeholder_behind_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nemo_rl_on_path(monkeypatch, tmp_path / "installed", (0, 0, 0))
    assert nemo_rl_on_path(monkeypatch, tmp_path / "checkout", (0, 6, 0), *REAL).present


@pytest.mark.parametrize("found", [None, ModuleSpec("nemo_rl", None)], ids=["nothing", "a folder without a package"])
def test_without_nemo_rl_the_remedy_is_its_source_repository(
    monkeypatch: pytest.MonkeyPatch, found: ModuleSpec | None
) -> None:
    monkeypatch.setattr(nemo_rl_probe.util, "find_spec", lambda name: found)
    finding = requirements.PROBES["nemo-rl"]()
    assert (finding.present, finding.version) == (False, None)
    assert "https://github.com/NVIDIA-NeMo/RL" in finding.remedy


def test_the_extra_nemo_rl_cannot_be_met_by_the_placeholder() -> None:
    """And is met by what NeMo RL calls itself: a release, or a checkout with its commit."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    demanded = [Requirement(line) for line in project["optional-dependencies"]["nemo-rl"]]
    (wanted,) = (requirement for requirement in demanded if requirement.name == "nemo-rl")
    assert not wanted.specifier.contains("0.0.0", prereleases=True)
    assert wanted.specifier.contains(f"{requirements.TESTED_NEMO_RL}.0")
    assert wanted.specifier.contains(f"{requirements.TESTED_NEMO_RL}.0+7ea279abf")


def test_what_is_refused_under_nemo_rl_is_printed_as_the_table_of_the_docs(command: Command) -> None:
    ended = command("doctor", "--nemo-rl-rules")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.rstrip("\n") == table()


@pytest.mark.parametrize(
    ("version", "is_supported"), [("0.32.0", True), ("0.25.1", True), ("0.320.1", False), ("0.24.0", False)]
)
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
