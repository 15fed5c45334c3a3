"""What is imported inside a worker works in an environment that holds only torch, numpy and Ray. B71."""

from __future__ import annotations

import importlib.util
import json
import pickle
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from equipment.worker_environment import build_worker_environment
from ray import cloudpickle

from nemo_rl_reshard.integrations.nemo_rl.engine_rank import perform_on_engine
from nemo_rl_reshard.integrations.nemo_rl.policy_rank import perform_on_policy
from nemo_rl_reshard.orchestration.outcome import Outcome
from nemo_rl_reshard.orchestration.rank_operations import perform
from nemo_rl_reshard.params.manifest import Manifest

ROOT = Path(__file__).parents[2]

# Installed here, needed by the driver or by an engine, and held by no trainer's environment.
ABSENT = ("pydantic", "omegaconf", "transformers", "vllm", "typer", "rich", "matplotlib", "tensorboard", "pytest")


def modules_of_a_worker() -> list[str]:
    """Every module that pyproject.toml forbids the driver's libraries, those of the core included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    named = [name for contract in contracts if contract["type"] == "forbidden" for name in contract["source_modules"]]
    modules = []
    for name in named:
        place = ROOT.joinpath(*name.split("."))
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        modules += [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return modules


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_worker_environment(tmp_path_factory.mktemp("worker") / "venv")


def run(interpreter: Path, program: str, *arguments: str) -> Any:
    """Run a program there, cut off from this process's paths and variables; what it printed as JSON."""
    done = subprocess.run(
        [interpreter, "-I", "-B", "-c", program, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


IMPORT_ALL = """
import importlib, importlib.util, json, sys
modules, absent = json.loads(sys.argv[1])
broken = {}
for name in modules:
    try:
        importlib.import_module(name)
    except Exception as error:
        broken[name] = repr(error)
print(json.dumps({
    "broken": broken,
    "present": [name for name in absent if importlib.util.find_spec(name)],
    "homes": {name: importlib.util.find_spec(name).origin for name in ("torch", "numpy", "ray", "nemo_rl_reshard")},
}))
"""


def test_everything_that_runs_in_a_worker_imports_there(interpreter: Path) -> None:
    assert all(importlib.util.find_spec(name) for name in ABSENT), "absent there would prove nothing"
    modules = modules_of_a_worker()
    assert {perform_on_policy.__module__, perform_on_engine.__module__, perform.__module__} <= set(modules)
    found = run(interpreter, IMPORT_ALL, json.dumps([modules, ABSENT]))
    assert found["present"] == []
    assert found["broken"] == {}
    assert all(home.startswith(str(interpreter.parents[1])) for home in found["homes"].values()), found["homes"]


PERFORM = """
import json, pickle, sys
from types import SimpleNamespace
import torch
perform_on_policy, perform_on_engine = pickle.loads(bytes.fromhex(sys.argv[1]))
worker = SimpleNamespace(model=torch.nn.Linear(3, 2), dtype=torch.float32, cpu_offload=False, rank=0)
request = json.loads(sys.argv[2])
print(json.dumps({
    "back": pickle.dumps((perform_on_policy, perform_on_engine)).hex(),
    "declared": perform_on_policy(worker, "declare", [request]),
    "engine": perform_on_engine(worker, "close", [request]),
}))
"""


@pytest.mark.parametrize("pickler", [pickle, cloudpickle], ids=["pickle", "Ray's"])
def test_b71_what_the_driver_sends_to_actors_is_a_name_and_works_there(interpreter: Path, pickler: Any) -> None:
    """Also what it imports only once it is called: a trainer's rank declares its weights."""
    sent = pickler.dumps((perform_on_policy, perform_on_engine))
    assert len(sent) < 300, "functions by reference, not by value"
    request = {"rank": 0, "specs": None, "num_trainers": 1, "epoch": 1, "answer_within_s": 20.0}
    answer = run(interpreter, PERFORM, sent.hex(), json.dumps(request))
    assert pickle.loads(bytes.fromhex(answer["back"])) == (perform_on_policy, perform_on_engine)
    (declared,) = map(Outcome.from_plain, answer["declared"])
    assert declared.fault is None
    manifest = Manifest.from_plain(declared.value["manifest"])
    assert sorted(spec.name for spec in manifest.specs) == ["bias", "weight"]
    assert Outcome.from_plain(answer["engine"]).fault is None, "an engine without a refit has nothing to close"
