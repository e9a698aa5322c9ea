"""The alert machine: persistence, hysteresis, cool-down, stable ids."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from perfagent.wire import Finding
from perfagent_server.alerts.state_machine import Change, Machine
from perfagent_server.rules.rule import Life

LIFE = Life(clear_steps=5, cooldown_steps=100, cooldown_s=600)
RESTATED = Life(clear_steps=5, restated=True)


def found(severity: str = "warning", ranks: list[int] | None = None, message: str = "", **more: Any) -> Finding:
    return Finding(rule="x", severity=severity, message=message or severity, ranks=ranks or [], **more)  # type: ignore[arg-type]


def play(life: Life, pattern: str, *, step_s: float = 1.0, restart_at: int = 0) -> list[Change]:
    """ "x" is a step with a finding, "." one without."""
    machine, changes = Machine("x"), []
    for step, mark in enumerate(pattern, 1):
        if step == restart_at:
            machine = Machine.restore(machine.snapshot())
        change = machine.observe(life, found() if mark == "x" else None, step, step * step_s, f"run {step}")
        changes += [change] if change is not None else []
    return changes


def kinds(changes: list[Change]) -> list[tuple[str, int]]:
    return [(change.kind, change.step) for change in changes]


def test_a_finding_must_hold_before_it_fires() -> None:
    assert kinds(play(Life(for_steps=3), "xx.xxx.xxxx")) == [("fire", 11)]
    assert kinds(play(Life(for_s=10.0), "x" * 5, step_s=3.0)) == [("fire", 5)]


def test_it_is_resolved_only_when_it_was_gone_for_long_enough() -> None:
    assert kinds(play(LIFE, "xx....x.....")) == [("fire", 1), ("resolve", 12)]
    assert kinds(play(Life(clear_s=10), "x..", step_s=6.0)) == [("fire", 1), ("resolve", 3)]


def test_within_the_cool_down_the_same_alert_opens_again() -> None:
    changes = play(LIFE, "x" + "." * 10 + "x" + "." * 700 + "x")
    assert [change.kind for change in changes] == ["fire", "resolve", "reopen", "resolve", "fire"]
    ids = [change.alert for change in changes]
    assert len(set(ids[:4])) == 1
    assert ids[4] != ids[0], "after it, a new one"


def test_more_ranks_or_a_higher_severity_change_the_open_alert() -> None:
    machine = Machine("x")
    machine.observe(LIFE, found(ranks=[0], cause="mild", fix="wait"), 1, 1.0, "run")
    assert machine.finding is not None
    machine.finding.evidence = {"also": "the gradients"}
    change = machine.observe(LIFE, found("critical", [3], cause="bad", fix="stop"), 2, 2.0, "run")
    assert change is not None
    told = change.finding
    assert (change.kind, told.severity, told.ranks) == ("update", "critical", [0, 3])
    assert (told.cause, told.fix, told.evidence) == ("bad", "stop", {"also": "the gradients"})
    assert machine.observe(LIFE, found("warning", [3]), 3, 3.0, "run") is None


def test_finding_of_every_step_is_told_with_its_newest_figures() -> None:
    machine = Machine("data_bound")
    machine.observe(RESTATED, found(since_step=25), 25, 0.0, "run")
    assert machine.finding is not None
    machine.finding.evidence = {"causes": [{"rank": 0, "message": "Decoding takes it."}]}
    machine.finding.fix = "Decode once."
    changes = [
        machine.observe(RESTATED, found(message=f"{30 + step % 7} %", since_step=step), step, float(step), "run")
        for step in range(26, 226)
    ]
    assert machine.finding is not None
    assert machine.finding.message == f"{30 + 225 % 7} % Decoding takes it.", "what joined it stays"
    assert (machine.finding.since_step, machine.finding.fix) == (25, "Decode once.")
    written = [change.step for change in changes if change is not None]
    assert written == [60, 120, 180], "the row is written now and then, not at every step"
    assert Machine.restore(machine.snapshot()) == machine


def test_severity_falls_after_the_time_that_resolving_takes() -> None:
    machine = Machine("data_bound")
    machine.observe(RESTATED, found("critical"), 1, 1.0, "run")
    severities = []
    for step in range(2, 20):
        change = machine.observe(RESTATED, found("critical" if step == 5 else "warning"), step, float(step), "run")
        severities += [(step, change.finding.severity)] if change is not None else []
        assert machine.finding is not None
        assert machine.finding.severity == ("warning" if step >= 6 + RESTATED.clear_steps else "critical")
    assert severities == [(6 + RESTATED.clear_steps, "warning")]


def test_a_rank_that_is_back_is_no_longer_named() -> None:
    machine = Machine("lost_contact")
    machine.observe(Life(restated=True), found("critical", [0, 1], "2 of 2 ranks"), 5, 5.0, "run")
    change = machine.observe(Life(restated=True), found("critical", [1], "1 of 2 ranks"), 5, 6.0, "run")
    assert change is not None
    assert (change.kind, change.finding.message, change.finding.ranks) == ("update", "1 of 2 ranks", [1])


def test_crash_found_to_be_the_first_takes_the_alert_over() -> None:
    machine = Machine("process_crash")
    first = found("critical", [0, 1], "rank 1: KeyError", since_step=8, fix="the first's")
    machine.observe(Life(restated=True), found("critical", [0], "rank 0: NCCL", since_step=9, fix="x"), 9, 9.0, "run")
    change = machine.observe(Life(restated=True), first, 9, 9.5, "run")
    assert change is not None
    told = change.finding
    assert (change.kind, told.message, told.fix, told.since_step) == ("update", first.message, "the first's", 8)


def test_alert_closed_amid_its_trouble_says_where_that_began() -> None:
    machine = Machine("x")
    machine.observe(LIFE, found("warning", [0]), 1, 1.0, "run")
    first = machine.finding
    machine.close(1, 1.0, "by hand")
    change = machine.observe(LIFE, found("warning", [1]), 2, 2.0, "run")
    assert change is not None
    assert (change.kind, change.opening) == ("reopen", 2)
    assert change.finding is first


@given(pattern=st.text("x.", max_size=200), cut=st.integers(0, 200))
def test_flapping_opens_one_alert_in_a_cool_down(pattern: str, cut: int) -> None:
    whole = play(LIFE, pattern)
    assert sum(change.kind == "fire" for change in whole) <= 1
    assert len({change.alert for change in whole}) <= 1
    assert [change.kind == "resolve" for change in whole] == [bool(place % 2) for place in range(len(whole))]
    again = play(LIFE, pattern, restart_at=cut)
    assert [(one.kind, one.step, one.alert) for one in again] == [(one.kind, one.step, one.alert) for one in whole]
