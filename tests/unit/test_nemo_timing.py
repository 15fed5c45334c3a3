"""What users of NeMo RL read about refits: labels of its timer, scalars, lines in the log."""

import logging
from types import SimpleNamespace

import pytest
from equipment.nemo_fakes import FakeTimer

from nemo_rl_reshard.integrations.nemo_rl.timing import (
    LABEL,
    plan_summary,
    record_phases,
    scalars,
    show_log,
    standard_label,
    summary_line,
)
from nemo_rl_reshard.runtime.report import Phase, RankReport, RefitReport


@pytest.fixture
def report():
    ranks = [RankReport(rank, version=7, seconds=2.0, leftover_bytes_received=250_000) for rank in (0, 1)]
    ranks[1].phases["network"] = 1.5
    ranks[1].bytes_received["network"] = 1_500_000
    return RefitReport.of([rank.to_plain() for rank in ranks], backend="reshard", seconds=2.5, floor_s=0.5)


def test_the_standard_label_is_timed_and_each_phase_below_it(report):
    timer = FakeTimer()
    with standard_label(timer):
        assert timer.running == {"prepare_for_generation/transfer_and_update_weights"}
    record_phases(timer, report)
    assert timer.recorded.keys() == {LABEL, *(f"{LABEL}/reshard_{phase}" for phase in Phase)}
    assert timer.recorded[f"{LABEL}/reshard_network"] == [1.5]


def test_a_label_is_closed_when_the_refit_fails():
    timer = FakeTimer()
    with pytest.raises(KeyError), standard_label(timer):
        raise KeyError
    assert not timer.running


def test_no_timer_is_as_good(report):
    with standard_label(None):
        pass
    record_phases(None, report)


def test_scalars_are_the_metrics_without_prefix_and_text(report):
    numbers = scalars(report)
    named = {name.removeprefix("refit/") for name in report.metrics()}
    assert numbers.keys() == named - {"backend"}
    assert {type(value) for value in numbers.values()} == {float}
    assert numbers["version"] == 7.0
    assert numbers["direct_share"] == 0.75


def test_one_line_tells_the_refit(report):
    line = summary_line(report)
    assert "\n" not in line
    assert line == "refit 7 by reshard: 2.500 s (network 1.500), 2 MB received, 75.0% direct, 0.20 of the floor"


def test_the_plan_is_summed_up_with_leftovers_by_reason():
    leftovers = [SimpleNamespace(tensor=f"t{index}", reason=("norm", "attention")[index % 2]) for index in range(5)]
    planned = SimpleNamespace(
        plan=SimpleNamespace(specs=range(9), leftovers=leftovers),
        summary={"totals": {"direct_bytes": 3_000_000, "unique_bytes": 4_000_000, "num_skipped": 1}},
        floor_s=0.0125,
    )
    assert plan_summary(planned, "reshard").splitlines() == [
        "refit plan for reshard: 9 tensors, 4 MB, 75.0% direct, 5 leftovers, 1 skipped, floor 12.500 ms",
        "  leftover (norm): 3, such as t0",
        "  leftover (attention): 2, such as t1",
    ]


def test_the_log_is_made_visible_once_and_only_where_nothing_shows_it(monkeypatch):
    log = logging.getLogger("nemo_rl_reshard")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "level", logging.NOTSET)
    monkeypatch.setattr(log, "propagate", False)
    show_log()
    show_log()
    assert log.level == logging.INFO
    assert len(log.handlers) == 1
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)  # pytest has handlers at the root
    log.setLevel(logging.WARNING)
    show_log()
    assert not log.handlers
    assert log.level == logging.WARNING, "somebody's own choice stays"
