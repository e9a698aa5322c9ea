"""wrong_optimizer and unchanged_tensor, on what the agent says of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from judging import START
from step_job import StepJob

from perfagent.wire import Event
from perfagent_server.rules.model.unchanged_tensor import UnchangedTensor
from perfagent_server.rules.model.wrong_optimizer import WrongOptimizer
from perfagent_server.rules.rule import Rule

NAMES = [f"encoder.{place}.weight" for place in range(7)]
EXPERTS = [f"layers.{place}.experts.7.up" for place in range(4)]


def told(what: str, share: Any, step: int, **data: Any) -> Event:
    more = {"names": NAMES, "count": 9, "numbers": 900, "steps": 20, **data}
    return Event(kind="parameters", time=START + step, step=step, data={"what": what, "share": share, **more})


def train(rule: Rule, events: Sequence[Event] = (), unmoved: Mapping[int, float] | None = None) -> StepJob:
    measured = {step: {"update/unmoved_share": share} for step, share in (unmoved or {}).items()}
    by_step = {one.step: [one] for one in events if one.step is not None}
    job = StepJob(rule, restarts=3, first=20)
    job.step = 0
    return job.go_on({"step_time_s": [0.1] * 20}, rows=1, every=20, measured=measured, events=by_step)


def test_parameters_of_no_optimizer_are_named_until_one_has_them() -> None:
    job = train(WrongOptimizer(), [told("unoptimized", 0.01, 60), told("unoptimized", 0.0, 200, names=[], count=0)])
    found = job.found
    assert (found.severity, found.since_step, found.evidence["share_pct"]) == ("warning", 40, 1.0)
    assert (found.evidence["parameters"], job.kinds) == (NAMES, ["fire", "resolve"])
    unclear = told("unoptimized", 7.0, 60, names=None, count="?", steps=None)
    for what, cause in (("without_gradient", "no gradient"), ("uncleared", "never cleared")):
        job = train(WrongOptimizer(), [unclear, told(what, 1.0, 80)])
        assert (job.found.evidence["share_pct"], job.changes[-1].finding.cause) == (100, cause)


@pytest.mark.parametrize(
    ("share", "data", "severity", "cause"),
    [
        (0.4, {"without_gradient": 451, "without_rate": 0}, "warning", "no gradient"),
        (0.4, {"without_gradient": 450, "without_rate": 900}, "warning", "learning rate"),
        (0.4, {"without_gradient": 0, "without_rate": 0}, "warning", ""),
        (0.1, None, "warning", ""),
        (0.099, None, "info", ""),
        (0.3, {"names": EXPERTS, "count": 4}, "info", ""),
    ],
    ids=["no gradient", "no rate", "rounded away", "a tenth", "a small part", "idle experts"],
)
def test_parameters_that_stand_still_are_told_with_the_cause(
    share: float, data: dict[str, Any] | None, severity: str, cause: str
) -> None:
    events = [] if data is None else [told("unmoved", share, step, **data) for step in (40, 80, 120)]
    job = train(UnchangedTensor(), events, dict.fromkeys((40, 80, 120), share))
    assert (job.found.severity, job.found.cause, job.alert.step) == (severity, cause, 80)
    assert job.found.since_step == (40 if data is None else 20)
    assert job.found.evidence["parameters"] == ([] if data is None else data.get("names", NAMES))


SILENT = {
    "little": (WrongOptimizer(), [told("unoptimized", 0.0099, 60)], {}),
    "something else": (WrongOptimizer(), [told("unmoved", 0.5, 60)], {}),
    "no sense": (WrongOptimizer(), [told("unoptimized", "much", 60, names=3)], {}),
    "all move": (UnchangedTensor(), [], {40: 0.0, 80: 0.0, 120: 0.0}),
    "by turns": (UnchangedTensor(), [], {40: 0.4, 80: 0.0, 120: 0.4, 160: 0.0}),
    "nothing moves at all": (UnchangedTensor(), [], {40: 1.0, 80: 1.0, 120: 1.0}),
    "an unused pooler": (UnchangedTensor(), [], {40: 0.0099, 80: 0.0099, 120: 0.0099}),
    "one comparison": (UnchangedTensor(), [], {40: 0.9}),
}


@pytest.mark.parametrize("kind", SILENT)
def test_healthy_parameters_are_silent(kind: str) -> None:
    assert train(*SILENT[kind]).changes == []


def test_parameters_that_move_again_resolve_the_alert() -> None:
    shares = {40: 0.4, 80: 0.4, 120: 0.4, 160: 0.009, 200: 0.009, 240: 0.0}
    job = train(UnchangedTensor(), (), shares)
    assert (job.kinds, job.changes[-1].step) == (["fire", "resolve"], 240)
