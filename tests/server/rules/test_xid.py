"""xid: an event of the driver."""

from __future__ import annotations

from typing import Any

import pytest
from judging import START, fired, frame, make_evaluator, restored, state

from perfagent.wire import Event
from perfagent_server.alerts.state_machine import Change
from perfagent_server.engine.evaluator import Evaluator


def report(evaluator: Evaluator, rank: int = 0, **data: Any) -> list[Change]:
    event = Event(kind="gpu", time=START + 5, step=None, data=data)
    return evaluator.take(frame({}, [], rank=rank, ident=evaluator.upto + 1, events=[event]))


def training() -> Evaluator:
    evaluator = make_evaluator()
    evaluator.take(frame({"loss": [2.0] * 20}, range(1, 21), events=[state("starting", world_size=2)]))
    return evaluator


@pytest.mark.parametrize(
    ("code", "severity", "cause"), [(79, "critical", "fallen off the bus"), (13, "warning", "the program")]
)
def test_an_error_of_the_driver_is_an_alert_until_the_run_ends(code: int, severity: str, cause: str) -> None:
    evaluator = training()
    [change] = report(evaluator, what="xid", code=code, index=3, meaning="GPU has fallen off the bus")
    assert (change.kind, change.finding.rule, change.finding.severity) == ("fire", "xid", severity)
    assert (change.finding.cause, change.finding.since_step) == (cause, 20)
    assert change.finding.title == f"Xid {code} of GPU 3 on rank 0"
    assert report(restored(evaluator), what="found", gpus=[]) == []
    assert evaluator.verdict().rule == "xid"


def test_a_worse_error_leads_and_other_ranks_join() -> None:
    evaluator = training()
    report(evaluator, what="xid", code=13, index=0)
    [change] = report(evaluator, rank=1, what="xid", code=48, index=1)
    assert (change.kind, change.finding.severity, change.finding.ranks) == ("update", "critical", [0, 1])


@pytest.mark.parametrize("data", [{"what": "xid"}, {"what": "xid", "code": "x"}, {"what": "lost", "code": 79}, {}])
def test_what_is_no_error_is_none(data: dict[str, Any]) -> None:
    assert fired(report(training(), **data)) == []
