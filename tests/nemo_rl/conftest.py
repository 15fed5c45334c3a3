"""The real NeMo RL on CPU: `make test-nemo-rl NEMO_RL=<checkout>`. Without a checkout every file is skipped."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from stand_ins.surroundings import Surroundings

NEEDED = "needs a checkout of NeMo RL and the packages it imports: make test-nemo-rl NEMO_RL=<checkout>"


def _checkout() -> Path | None:
    folder = Path(os.environ.get("NEMO_RL") or "/nowhere")
    # hydra is one of the packages that only the environment of this tier has.
    ready = (folder / "nemo_rl" / "__init__.py").exists() and find_spec("hydra") is not None
    return folder.resolve() if ready else None


CHECKOUT = _checkout()
SURROUNDINGS = pytest.StashKey[Surroundings]()


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
    config.stash[SURROUNDINGS] = Surroundings(CHECKOUT)


def pytest_unconfigure(config: pytest.Config) -> None:
    if SURROUNDINGS in config.stash:
        config.stash[SURROUNDINGS].close()


@pytest.fixture(scope="session")
def surroundings(pytestconfig: pytest.Config) -> Surroundings:
    """What the run borrows."""
    return pytestconfig.stash[SURROUNDINGS]


@pytest.fixture(scope="session")
def checkout(surroundings: Surroundings) -> Path:
    """The folder of the NeMo RL checkout."""
    return surroundings.checkout


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A Ray that believes in GPUs: NeMo RL places one worker on each."""
    import ray

    ray.init(
        num_cpus=64,
        num_gpus=8,
        include_dashboard=False,
        namespace=f"reshard-{uuid.uuid4().hex}",
        object_store_memory=200 << 20,
        runtime_env={"env_vars": dict(os.environ)},
        logging_level="warning",
        log_to_driver=bool(os.environ.get("RESHARD_TEST_LOGS")),
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session", autouse=True)
def _leave_no_trace(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever the tests did, neither the checkout nor the installed vLLM differs afterwards."""
    yield
    if CHECKOUT is not None:
        request.config.stash[SURROUNDINGS].assert_untouched()
