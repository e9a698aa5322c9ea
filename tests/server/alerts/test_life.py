"""The alert machine: persistence, hysteresis, cool-down, stable ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perfagent.wire import Finding
from perfagent_server.alerts.life import Change, Life, Machine

LIFE = Life(clear_steps=5, cooldown_steps=100, cooldown_s=600)


def found(severity: str = "warning", ranks: list[int] | None = None) -> Finding:
    return Finding(rule="x", severity=severity, message=severity, ranks=ranks or [])  # type: ignore[arg-type]


def play(life: Life, pattern: str, *, step_s: float = 1.0, machine: Machine | None = None) -> list[Change]:
    """ "x" is a step with a finding, "." one without."""
    machine = machine or Machine("x")
    changes = []
    for step, mark in enumerate(pattern, 1):
        change = machine.observe(life, found() if mark == "x" else None, step, step * step_s, "run")
        if change is not None:
            changes.append(change)
    return changes


def kinds(changes: list[Change]) -> list[tuple[str, int]]:
    return [(change.kind, change.step) for change in changes]


def test_a_finding_must_hold_before_it_fires() -> None:
    assert kinds(play(Life(for_steps=3), "xx.xxx.xxxx")) == [("fire", 11)]
    assert kinds(play(Life(for_s=10.0), "x" * 5, step_s=3.0)) == [("fire", 5)]


def test_it_is_resolved_only_when_it_was_gone_for_long_enough() -> None:
    assert kinds(play(LIFE, "xx....x.....")) == [("fire", 1), ("resolve", 12)]
    assert kinds(play(Life(clear_s=10), "x..", step_s=6.0)) == [("fire", 1), ("resolve", 3)]


def test_within_the_cool_down_the_same_alert_opens_again_and_after_it_a_new_one() -> None:
    changes = play(LIFE, "x" + "." * 10 + "x" + "." * 700 + "x")
    assert [change.kind for change in changes] == ["fire", "resolve", "reopen", "resolve", "fire"]
    ids = [change.alert for change in changes]
    assert len(set(ids[:4])) == 1
    assert ids[4] != ids[0]


def test_more_ranks_or_a_higher_severity_change_the_open_alert() -> None:
    machine = Machine("x")
    machine.observe(LIFE, found(ranks=[0]), 1, 1.0, "run")
    change = machine.observe(LIFE, found("critical", [3]), 2, 2.0, "run")
    assert change is not None
    assert (change.kind, change.finding.severity, change.finding.ranks) == ("update", "critical", [0, 3])
    assert machine.observe(LIFE, found("warning", [3]), 3, 3.0, "run") is None


@given(pattern=st.text("x.", max_size=200), cut=st.integers(0, 200))
def test_flapping_never_opens_two_alerts_within_a_cool_down_and_survives_snapshots(pattern: str, cut: int) -> None:
    whole = play(LIFE, pattern)
    assert sum(change.kind == "fire" for change in whole) <= 1
    assert len({change.alert for change in whole}) <= 1
    machine = Machine("x")
    changes = []
    for step, mark in enumerate(pattern, 1):
        if step == cut:
            machine = Machine.restore(machine.snapshot())
        change = machine.observe(LIFE, found() if mark == "x" else None, step, float(step), "run")
        changes += [change] if change is not None else []
    assert [(change.kind, change.step, change.alert) for change in changes] == [
        (change.kind, change.step, change.alert) for change in whole
    ]


@given(pattern=st.text("x.", min_size=1, max_size=100))
def test_firing_and_resolving_alternate(pattern: str) -> None:
    opened = False
    for change in play(LIFE, pattern):
        assert (change.kind == "resolve") == opened
        opened = not opened
