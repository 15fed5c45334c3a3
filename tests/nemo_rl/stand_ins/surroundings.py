"""What a run of this tier borrows and must leave as it found it: a checkout of NeMo RL and the installed vLLM."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from stand_ins import private_vllm, processes


class Surroundings:
    """Makes this process the driver; `close` removes what was made for it."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        self.installed_vllm = private_vllm.installed_vllm()
        self._before = self._borrowed()
        folder = Path(tempfile.mkdtemp(prefix="nemo-rl-vllm-"))
        self.private_vllm = private_vllm.copy_vllm(self.installed_vllm, folder) / "vllm"
        processes.enter(checkout, folder)

    def assert_untouched(self) -> None:
        """Neither what is borrowed changed, nor did a file appear in it."""
        assert self._borrowed() == self._before

    def close(self) -> None:
        shutil.rmtree(self.private_vllm.parent, ignore_errors=True)

    def _borrowed(self) -> tuple[str, str]:
        # Ignored files too: bytecode, say.
        command = ["git", "-C", str(self.checkout), "status", "--short", "--ignored"]
        status = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        return status, private_vllm.fingerprint(self.installed_vllm)
