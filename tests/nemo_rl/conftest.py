"""The real NeMo RL on CPU: run with `make test-nemo-rl NEMO_RL=<checkout>`; without a checkout every file is skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from stand_ins import private_vllm, processes

NEEDED = "needs a checkout of NeMo RL and the packages it imports: make test-nemo-rl NEMO_RL=<checkout>"


def _checkout() -> Path | None:
    folder = Path(os.environ.get("NEMO_RL") or "/nowhere")
    # hydra is one of the packages that only the environment of this tier has.
    ready = (folder / "nemo_rl" / "__init__.py").exists() and find_spec("hydra") is not None
    return folder.resolve() if ready else None


CHECKOUT = _checkout()
INSTALLED = pytest.StashKey[Path]()
STATUS = pytest.StashKey[str]()
BEFORE = pytest.StashKey[str]()
PRIVATE = pytest.StashKey[Path]()


class Unavailable(pytest.Module):
    """A test file that is not even imported, since its imports would fail."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(NEEDED, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return Unavailable.from_parent(parent, path=module_path) if CHECKOUT is None else None


def pytest_configure(config: pytest.Config) -> None:
    """Before any test file is imported: become a driver that finds NeMo RL and a vLLM that may be edited."""
    if CHECKOUT is None:
        return
    # Other people's packages warn as they please; ours are held to their warnings by the other tiers.
    config.addinivalue_line("filterwarnings", "ignore")
    config.stash[STATUS] = git_status(CHECKOUT)
    config.stash[INSTALLED] = private_vllm.installed_vllm()
    config.stash[BEFORE] = private_vllm.fingerprint(config.stash[INSTALLED])
    config.stash[PRIVATE] = Path(tempfile.mkdtemp(prefix="nemo-rl-vllm-"))
    processes.enter(CHECKOUT, private_vllm.copy_vllm(config.stash[INSTALLED], config.stash[PRIVATE]))


def pytest_unconfigure(config: pytest.Config) -> None:
    if PRIVATE in config.stash:
        shutil.rmtree(config.stash[PRIVATE], ignore_errors=True)


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The folder of the NeMo RL checkout."""
    assert CHECKOUT is not None
    return CHECKOUT


@pytest.fixture(scope="session", autouse=True)
def _leave_no_trace(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever the tests did, neither the checkout nor the installed vLLM differs afterwards."""
    yield
    if CHECKOUT is not None:
        assert git_status(CHECKOUT) == request.config.stash[STATUS]
        installed = request.config.stash[INSTALLED]
        assert private_vllm.fingerprint(installed) == request.config.stash[BEFORE]


def git_status(checkout: Path) -> str:
    """What differs from the commit, ignored files (bytecode, say) included; empty text for a checkout as cloned."""
    command = ["git", "-C", str(checkout), "status", "--short", "--ignored"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
