"""`doctor` on the real NeMo RL: found for what it is, with every name that the plugin touches."""

from __future__ import annotations

from pathlib import Path

from nemo_rl_reshard.cli.nemo_rl_probe import find_nemo_rl
from nemo_rl_reshard.cli.requirements import PROBES, TESTED_NEMO_RL


def test_the_checkout_is_nemo_rl_and_lacks_nothing(checkout: Path) -> None:
    found = find_nemo_rl()
    assert found is not None
    assert found.folder == checkout / "nemo_rl"
    finding = PROBES["nemo-rl"]()
    assert (finding.present, finding.note) == (True, "")
    assert finding.version is not None
    assert finding.version.startswith(f"{TESTED_NEMO_RL}.")
