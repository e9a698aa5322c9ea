"""What scripts/faults makes of the demo's runs; the runs themselves take too long for a test."""

from __future__ import annotations

from pathlib import Path

from faults.demo_faults import Seen, keep, outcomes, read

HEALTHY = Seen("none", "healthy", None, None, None)
NAN = Seen("nan", "nonfinite_loss", "nonfinite_loss", 0, 0.3)
SYNC = Seen("sync", "sync_bound", "sync_bound", 33, 5.4)


def test_results_of_faults_not_run_again_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "demo_faults.json"
    for one in (SYNC, NAN, HEALTHY, Seen("sync", "healthy", None, None, None, wrong=("no alert named it",))):
        keep(one, file)
    assert [(one["fault"], one["verdict"]) for one in read(file)] == [
        ("none", "healthy"), ("nan", "nonfinite_loss"), ("sync", "healthy"),
    ]  # fmt: skip
    assert {*read(file)[0]} == {"fault", "verdict", "alert", "steps_to_alert", "seconds_to_alert"}


def test_fault_is_right_when_verdict_and_alert_name_it() -> None:
    late = Seen("leak", "host_memory_leak", None, None, None)
    sick, healthy = outcomes([one.kept() for one in (HEALTHY, NAN, SYNC, late)], {}, 2000)
    assert (sick.survived, sick.total, healthy.survived, healthy.total) == (2, 3, 1, 1)
    assert sick.figures == "the latest alert 5 s after its fault began; not right: leak (host_memory_leak)"
    sick, healthy = outcomes([HEALTHY.kept(), NAN.kept()], {"nan": ["no evidence"], "none": ["an alert"]}, 2000)
    assert (sick.survived, healthy.survived) == (0, 0)
