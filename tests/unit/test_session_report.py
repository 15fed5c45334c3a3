"""Rank reports add up to one refit report with the keys that runs record."""

from __future__ import annotations

import pytest

from nemo_rl_reshard.runtime.report import Phase, RankReport, RefitReport
from nemo_rl_reshard.topology import Link


def two_reports() -> list[RankReport]:
    trainer = RankReport(0, 7, seconds=2.0, peak_extra_bytes=30, leftover_bytes_received=10)
    trainer.phases |= {Phase.PACK: 0.5, Phase.NETWORK: 1.0}
    engine = RankReport(1, 7, seconds=2.5, peak_extra_bytes=20, leftover_bytes_received=40)
    engine.phases |= {Phase.NETWORK: 0.25, Phase.EXCHANGE: 2.0}
    engine.bytes_received |= {Link.NETWORK: 100, Link.FAST: 50}
    return [engine, trainer]


def test_times_are_the_slowest_ranks_and_bytes_are_summed() -> None:
    report = RefitReport.of([each.to_plain() for each in two_reports()], backend="reshard", floor_s=0.5)
    assert [each.rank for each in report.ranks] == [0, 1]
    assert report.metrics() == {
        "refit/backend": "reshard",
        "refit/version": 7,
        "refit/seconds": 2.5,
        "refit/seconds_declare": 0.0,
        "refit/seconds_pack": 0.5,
        "refit/seconds_network": 1.0,
        "refit/seconds_exchange": 2.0,
        "refit/seconds_leftover": 0.0,
        "refit/seconds_install": 0.0,
        "refit/seconds_verify": 0.0,
        "refit/bytes_received_max": 190,
        "refit/bytes_received_sum": 200,
        "refit/direct_share": 0.75,
        "refit/fraction_of_floor": 0.2,
        "refit/peak_extra_bytes": 30,
    }


def test_the_drivers_own_measure_wins() -> None:
    report = RefitReport.of([each.to_plain() for each in two_reports()], backend="reshard", seconds=4.0, floor_s=1.0)
    assert report.seconds == 4.0
    assert report.fraction_of_floor == 0.25


@pytest.mark.parametrize("versions", [(), (1, 2)])
def test_reports_of_no_or_several_refits_are_refused(versions: tuple[int, ...]) -> None:
    plain = [RankReport(rank, version).to_plain() for rank, version in enumerate(versions)]
    with pytest.raises(ValueError, match="have one version"):
        RefitReport.of(plain, backend="reshard")


def test_phases_are_timed_even_when_they_fail() -> None:
    report = RankReport(0, 1)
    with pytest.raises(KeyError), report.timing(Phase.PACK):
        raise KeyError
    assert report.phases[Phase.PACK] > 0
