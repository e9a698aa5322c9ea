"""Where the step's time goes: data_bound and low_gpu_utilization."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from judging import fired, frame, judge_series, make_evaluator, restored, state, told
from step_job import StepJob
from syrupy.assertion import SnapshotAssertion

from perfagent_server.rules.speed.data_bound import DataBound


@pytest.mark.parametrize("ended", [False, True])
def test_a_run_of_one_window_has_the_verdict_and_no_alert_yet(ended: bool) -> None:
    changes, evaluator = judge_series({"step_time_s": [0.06] * 30, "phase/data_s": [0.05] * 30})
    if ended:
        changes += evaluator.take(frame({}, [], ident=evaluator.upto + 1, events=[state("finished")]))
    assert changes == []
    assert evaluator.verdict().rule == "data_bound"
    assert restored(evaluator).verdict() == evaluator.verdict()


def waiting(waits: Sequence[float], rest: float = 0.05) -> dict[str, list[float]]:
    return {"step_time_s": [rest + wait for wait in waits], "phase/data_s": [*waits]}


def test_a_loader_that_sleeps_is_told_within_a_short_run(words: SnapshotAssertion) -> None:
    changes, evaluator = judge_series(waiting([0.05] * 60, 0.01), rows=10)
    [alert] = fired(changes, "data_bound")
    found = alert.finding
    assert (alert.step, found.since_step, found.severity) == (45, 25, "critical"), "two windows after the first steps"
    assert (found.message, found.fix) == words
    assert (found.evidence["steps"], found.gain_pct) == (20, pytest.approx(83.3, abs=0.1))
    verdict = told(evaluator, {"step_time_s": [0.09] * 100, "phase/data_s": [0.01] * 100})
    assert (verdict.rule, verdict.message) == ("data_bound", found.message), "no other figures than its own"
    assert verdict.evidence.items() >= found.evidence.items()


BUSY, TINY = {"gpu/utilization_pct": [97.0] * 100}, [0.0005] * 200
WORKERS = {"host/cores": [8.0] * 100, "process/workers": [4.0] * 100}


EVALUATED = {"phase/eval_s": [2.0 if step == 30 else 0.0 for step in range(1, 61)]}


@pytest.mark.parametrize(
    ("series", "severity", "share_pct"),
    [
        (waiting([0.009] * 60, 0.091), None, 0),
        (waiting([0.012] * 60, 0.088), "info", 12),
        (waiting([0.032] * 60, 0.068), "info", 32),
        (waiting([0.034] * 60, 0.066), "warning", 34),
        (waiting(TINY, 0.001), None, 0),
        (waiting([3.0 if step % 50 == 0 else 0.001 for step in range(300)], 0.1), None, 0),
        (waiting([0.21 if step % 4 == 0 else 0.0 for step in range(100)]) | WORKERS, "critical", 51.2),
        (waiting([0.03] * 100, 0.07) | BUSY, None, 0),
        (waiting([0.03] * 100, 0.07) | {"gpu/utilization_pct": [60.0] * 100}, "warning", 30),
        ({"step_time_s": [0.1] * 100}, None, 0),
    ],
    ids=[
        "less",
        "a tenth",
        "less than a third",
        "a third",
        "tiny",
        "of an epoch",
        "bursts",
        "busy GPUs",
        "GPUs that wait",
        "no loader",
    ],
)
def test_the_share_of_the_wait_decides(series: dict[str, list[float]], severity: str | None, share_pct: float) -> None:
    found = [change.finding for change in fired(judge_series(series)[0], "data_bound")]
    assert [one.severity for one in found] == ([severity] if severity else [])
    assert [one.evidence["share_pct"] for one in found] == [pytest.approx(share_pct, abs=0.1)] * len(found)


@pytest.mark.parametrize(("device_s", "severity"), [(0.098, None), (0.085, "info"), (0.05, "info")])
def test_a_wait_beside_a_busy_device_gains_what_it_leaves(device_s: float, severity: str | None) -> None:
    """The host runs ahead: it waits 30 ms for its batch while the device works on what it was given before."""
    phases = {"forward": 0.33, "backward": 0.61, "optimizer": 0.06}
    columns = {f"phase/{phase}_s": [share * device_s] * 60 for phase, share in phases.items()}
    changes, _ = judge_series(waiting([0.03] * 60, 0.07) | columns)
    assert [change.finding.severity for change in fired(changes)] == ([severity] if severity else [])
    for change in fired(changes):
        assert change.finding.evidence["hidden_wait_s"] == pytest.approx(max(0.0, 0.03 - (0.1 - device_s)))


@pytest.mark.parametrize("rows", [7, 2000])
def test_a_loader_that_is_slow_all_the_time_is_one_alert(rows: int) -> None:
    """Also where more steps come at once than the newest step times that are kept."""
    changes, evaluator = judge_series(waiting([0.025] * 600, 0.015), rows=rows, step_s=0.04)
    assert [change.kind for change in changes] == ["fire"]
    machine = evaluator.machines["data_bound"]
    assert machine.hits == machine.judged - 24, "only before the alert was there too little to judge"


def test_one_slow_rank_is_not_the_loader_of_all() -> None:
    job = StepJob(DataBound(), ranks=4)
    for begin in range(1, 101, 10):
        for rank in range(4):
            columns = {"step_time_s": [0.06] * 10, "phase/data_s": [0.05 if rank == 0 else 0.0] * 10}
            ident = job.evaluator.upto + 1
            job.changes += job.evaluator.take(frame(columns, range(begin, begin + 10), rank=rank, ident=ident))
    assert job.changes == []


def test_a_healed_loader_is_resolved_and_does_not_flap() -> None:
    shares = [0.3] * 60 + [0.101 if step % 2 else 0.099 for step in range(200)] + [0.0] * 700
    changes, _ = judge_series({"step_time_s": [0.1] * len(shares), "phase/data_s": [0.1 * share for share in shares]})
    assert [change.kind for change in changes if change.kind != "update"] == ["fire", "resolve"]


def idling(
    pct: float | None, seconds: int, phases: Callable[[int], dict[str, float]], *, pause: range = range(0)
) -> list:
    """What is told of a run with a step and a reading of its GPU each second; no steps in `pause`."""
    evaluator, changes = make_evaluator(), []
    for second in range(1, seconds + 1):
        spent = phases(second)
        columns = {f"phase/{name}_s": [value] for name, value in spent.items()} | {"step_time_s": [sum(spent.values())]}
        if second not in pause:
            changes += evaluator.take(frame(columns, [second], ident=2 * second, step_s=1.0))
        if pct is not None:
            changes += evaluator.take(frame({"gpu/utilization_pct": [pct]}, [second], ident=2 * second + 1, step_s=1.0))
    return fired(changes, "low_gpu_utilization")


def own_code(_: int) -> dict[str, float]:
    return {"other": 0.7, "forward": 0.3}


@pytest.mark.parametrize(
    ("pct", "seconds", "pause", "severity"),
    [
        (29.0, 630, range(0), "warning"), (30.0, 630, range(0), "info"), (69.0, 630, range(0), "info"),
        (70.0, 630, range(0), None), (5.0, 580, range(0), None), (5.0, 640, range(100, 250), None), (None, 700, range(0), None),
    ],
    ids=["idle", "30 %", "half", "70 %", "ten minutes", "of stepping", "no GPU"],
)  # fmt: skip
def test_a_gpu_that_idles_for_ten_minutes_is_found(
    pct: float | None, seconds: int, pause: range, severity: str | None
) -> None:
    found = idling(pct, seconds, own_code, pause=pause)
    assert [change.finding.severity for change in found] == ([severity] if severity else [])
    assert all(change.finding.evidence["over_s"] >= 300 for change in found)


@pytest.mark.parametrize(
    ("phases", "shares"),
    [
        (own_code, {"other": 70, "forward": 30}),
        (lambda second: {"forward": 0.5, "other": 0.5, **({"checkpoint": 6.0} if second % 32 == 0 else {})},
         {"forward": 42.1, "other": 42.1, "checkpoint": 15.8}),
        (lambda _: {"rollout": 0.8, "forward": 0.2}, {"rollout": 80, "forward": 20}),
    ],
    ids=["its own code", "a checkpoint now and then", "rollouts"],
)  # fmt: skip
def test_what_keeps_a_gpu_idle_is_weighed_by_all_steps(
    phases: Callable[[int], dict[str, float]], shares: dict[str, float], words: SnapshotAssertion
) -> None:
    [alert] = idling(20.0, 640, phases)
    assert alert.finding.evidence["phase_shares_pct"] == pytest.approx(shares, abs=0.1)
    assert alert.finding.message == words


def test_phases_of_a_slow_loader_are_means_over_its_steps() -> None:
    [alert] = fired(judge_series(waiting([0.05] * 60) | EVALUATED, rows=1)[0], "data_bound")
    assert alert.finding.evidence["phases_s"] == pytest.approx({"data": 0.05, "eval": 2.0 / 20})
