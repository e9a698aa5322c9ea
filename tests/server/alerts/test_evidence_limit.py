"""What a sender gives as evidence stays small enough for a snapshot, a row and a page."""

from __future__ import annotations

from typing import Any

from judging import fired, frame, make_evaluator

from perfagent.wire import Event
from perfagent_server.alerts.causes import cause_of
from perfagent_server.alerts.evidence_limit import MAX_EVIDENCE_BYTES

LARGE = {"step": 7, "trace": "x" * 2**20, "lines": ["\x01" * 10_000] * 3, "module": "head"}


def test_a_reported_finding_is_cut_and_says_what_was_dropped() -> None:
    judge = make_evaluator()
    data: dict[str, Any] = {"rule": "mine", "severity": "critical", "message": "Broken.", "evidence": LARGE}
    event = Event(kind="finding", time=1.0, step=7, data=data | {"ranks": list(range(200_000)), "fix": "y" * 2**20})
    (alert,) = fired(judge.take(frame({"loss": [1.0]}, [7], ident=1, events=[event])), "mine")
    evidence = alert.finding.evidence
    assert (evidence["step"], evidence["module"], len(alert.finding.ranks)) == (7, "head", 4096)
    assert evidence["dropped"].startswith("trace (1048588 bytes), lines (")
    assert evidence.keys() == {"step", "module", "dropped"}
    assert len(judge.snapshot()) < 4 * MAX_EVIDENCE_BYTES


def test_a_cause_is_cut_too() -> None:
    cause = cause_of({"explains": ["nonfinite_loss" * 1000], "evidence": LARGE}, rank=0, step=7)
    assert cause is not None
    assert cause["evidence"].keys() == {"step", "module", "dropped"}
    assert len(cause["explains"][0]) == 64
