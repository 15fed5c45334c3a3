"""Neither the checkout nor the installed vLLM is changed, although NeMo RL edits the vLLM that it finds."""

from __future__ import annotations

import subprocess
import sys

from stand_ins.surroundings import Surroundings

PATCH = """
import sys
from nemo_rl.models.generation.vllm.patches import _apply_vllm_patches
_apply_vllm_patches(sys.executable)
"""


def test_nemo_rl_edits_the_private_copy_alone(surroundings: Surroundings) -> None:
    """What a stock worker does first, in a process with the environment of one."""
    subprocess.run([sys.executable, "-c", PATCH], check=True, capture_output=True, timeout=200)
    edited = "v1/executor/ray_executor.py"
    private, installed = surroundings.private_vllm / edited, surroundings.installed_vllm / edited
    assert private.read_text() != installed.read_text()
    surroundings.assert_untouched()
