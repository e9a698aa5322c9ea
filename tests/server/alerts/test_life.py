"""The alert machine: persistence, hysteresis, cool-down, stable ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perfagent.wire import Finding
from perfagent_server.alerts.state_machine import Change, Machine
from perfagent_server.rules.rule import Life

LIFE = Life(clear_steps=5, cooldown_steps=100, cooldown_s=600)
RESTATED = Life(clear_steps=5, restated=True)


def found(severity: str = "warning", ranks: list[int] | None = None) -> Finding:
    return Finding(rule="x", severity=severity, message=severity, ranks=ranks or [])  # type: ignore[arg-type]


def play(life: Life, pattern: str, *, step_s: float = 1.0, machine: Machine | None = None) -> list[Change]:
    """ "x" is a step with a finding, "." one without."""
    machine = machine or Machine("x")
    changes = []
    for step, mark in enumerate(pattern, 1):
        change = machine.observe(life, found() if mark == "x" else None, step, step * step_s, f"run {step}")
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


def share(pct: int, *, severity: str = "warning", since_step: int = 26) -> Finding:
    return Finding(rule="data_bound", severity=severity, message=f"{pct} %", since_step=since_step)  # type: ignore[arg-type]


def test_what_is_found_anew_at_every_step_is_told_with_its_newest_figures() -> None:
    machine = Machine("data_bound")
    machine.observe(RESTATED, share(83, since_step=25), 25, 0.0, "run")
    changes = [machine.observe(RESTATED, share(30 + step % 7), step, float(step), "run") for step in range(26, 226)]
    assert machine.finding is not None
    assert (machine.finding.message, machine.finding.since_step) == (f"{30 + 225 % 7} %", 25)
    written = [change.step for change in changes if change is not None]
    assert written == [60, 120, 180], "the row is written now and then, not at every step"
    restored = Machine.restore(machine.snapshot())
    assert restored == machine


def test_a_severity_falls_once_it_was_lower_for_as_long_as_resolving_takes() -> None:
    machine = Machine("data_bound")
    machine.observe(RESTATED, share(83, severity="critical"), 1, 1.0, "run")
    severities = []
    for step in range(2, 20):
        worse_again = step == 5
        found = share(90 if worse_again else 11, severity="critical" if worse_again else "warning")
        change = machine.observe(RESTATED, found, step, float(step), "run")
        severities += [(step, change.finding.severity)] if change is not None else []
        assert machine.finding is not None
        assert machine.finding.severity == ("warning" if step >= 6 + RESTATED.clear_steps else "critical")
    assert severities == [(6 + RESTATED.clear_steps, "warning")]


def test_a_rank_that_is_back_is_no_longer_named() -> None:
    machine = Machine("lost_contact")

    def silent(*ranks: int) -> Finding:
        return Finding(rule="lost_contact", severity="critical", message=f"{len(ranks)} of 2 ranks", ranks=list(ranks))

    machine.observe(Life(restated=True), silent(0, 1), 5, 5.0, "run")
    change = machine.observe(Life(restated=True), silent(1), 5, 6.0, "run")
    assert change is not None
    assert (change.kind, change.finding.message, change.finding.ranks) == ("update", "1 of 2 ranks", [1])


def test_a_crash_that_turns_out_to_be_the_first_takes_the_alert_over() -> None:
    machine = Machine("process_crash")

    def crash(message: str, step: int, ranks: list[int]) -> Finding:
        return Finding(
            rule="process_crash", severity="critical", message=message, since_step=step, ranks=ranks, fix=message
        )

    machine.observe(Life(restated=True), crash("rank 0: NCCL aborted", 9, [0]), 9, 9.0, "run")
    change = machine.observe(Life(restated=True), crash("rank 1: KeyError", 8, [0, 1]), 9, 9.5, "run")
    assert change is not None
    found = change.finding
    assert (change.kind, found.message, found.fix, found.since_step) == (
        "update",
        "rank 1: KeyError",
        "rank 1: KeyError",
        8,
    )


def test_what_joined_a_finding_stays_with_its_newer_one() -> None:
    machine = Machine("data_bound")
    machine.observe(RESTATED, share(83, since_step=25), 25, 0.0, "run")
    assert machine.finding is not None
    machine.finding.evidence = {"causes": [{"rank": 0, "message": "Decoding takes it."}]}
    machine.finding.fix = "Decode once."
    machine.observe(RESTATED, share(30), 26, 1.0, "run")
    assert (machine.finding.message, machine.finding.fix) == ("30 % Decoding takes it.", "Decode once.")


def test_an_alert_closed_by_hand_in_the_midst_of_its_trouble_still_says_where_that_began() -> None:
    machine = Machine("x")
    machine.observe(LIFE, found("warning", [0]), 1, 1.0, "run")
    first = machine.finding
    machine.close(1, 1.0, "by hand")
    change = machine.observe(LIFE, found("warning", [1]), 2, 2.0, "run")
    assert change is not None
    assert (change.kind, change.opening) == ("reopen", 2)
    assert change.finding is first


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
        change = machine.observe(LIFE, found() if mark == "x" else None, step, float(step), f"run {step}")
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
