"""The scripted agent keeps to its protocol."""

from __future__ import annotations

import json
from typing import Any

from sick.batches import chosen
from sick.scripted_agent import MOST_BYTES, PROGRAMS, named

NOTHING = {"severity": "healthy", "rule": "healthy", "untrusted": {"message": "Nothing holds this run back."}}


def finding(rule: str, severity: str = "warning", step: int = 1, **own: Any) -> dict[str, Any]:
    return {"rule": rule, "severity": severity, "since_step": step, "untrusted": {"message": f"{rule} it is", **own}}


def cause(verdict: dict[str, Any], alerts: list[Any] = [], findings: list[Any] = []) -> Any:  # noqa: B006
    answers = (json.dumps(one) for one in (verdict, {"alerts": alerts}, {"findings": findings}))
    return named(*answers).get("rule")


def test_the_first_loud_cause_is_named_verdict_before_alerts() -> None:
    alerts = [finding("loss_spike", step=3), finding("nonfinite_loss", "critical", 9), finding("oom", "critical", 5)]
    assert cause(finding("data_bound"), alerts) == "data_bound"
    assert cause(NOTHING, alerts, [finding("data_bound")]) == "oom"
    assert cause(NOTHING, [finding("compute_bound", "info")], [finding("data_bound")]) == "data_bound"
    assert cause(NOTHING) == "healthy"
    assert cause({**finding("other"), "untrusted": {"rule": "of a script"}}) == "of a script"


def test_an_answer_that_is_too_long_or_no_json_counts_as_none() -> None:
    long = finding("data_bound", text="x" * MOST_BYTES)
    assert cause(long) is None
    assert named("", "{}", "{}") == {}


def test_its_programs_are_the_first_twenty_sick_ones() -> None:
    sick = sorted(one.name for one in chosen(["unseen_1"]) if not one.expected.healthy)
    assert tuple(sick[:20]) == PROGRAMS
