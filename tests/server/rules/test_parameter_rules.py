"""wrong_optimizer and unchanged_tensor, on what the agent says of parameters."""

from __future__ import annotations

from typing import Any

import pytest
from judging import START, fired, frame, make_evaluator, restored

from perfagent.wire import Event
from perfagent_server.alerts.state_machine import Change
from perfagent_server.rules.model.unchanged_tensor import UnchangedTensor
from perfagent_server.rules.model.wrong_optimizer import WrongOptimizer
from perfagent_server.rules.rule import Rule

NAMES = [f"encoder.{place}.weight" for place in range(7)]


def told(what: str, share: float, step: int, **data: Any) -> Event:
    more = {"names": NAMES, "count": 9, "numbers": 900, "steps": 20, **data}
    return Event(kind="parameters", time=START + step, step=step, data={"what": what, "share": share, **more})


def train(
    rule: Rule, says: dict[int, list[Event]], unmoved: dict[int, float] | None = None, steps: int = 400
) -> list[Change]:
    evaluator = make_evaluator(rules=(rule,))
    changes: list[Change] = []
    for step in range(20, steps + 1, 20):
        columns = {"step_time_s": [0.1]}
        if step in (unmoved or {}):
            columns["update/unmoved_share"] = [(unmoved or {})[step]]
        changes += evaluator.take(frame(columns, [step], ident=evaluator.upto + 1, events=says.get(step, [])))
        if step % 60 == 0:
            evaluator = restored(evaluator)
    return changes


def only(changes: list[Change]) -> Change:
    [change] = fired(changes)
    return change


def test_parameters_that_no_optimizer_has_are_named() -> None:
    change = only(train(WrongOptimizer(), {60: [told("unoptimized", 0.37, 60)]}))
    found = change.finding
    assert found.severity == "warning"
    assert found.title == "37 % of the model gets gradients that no optimizer uses"
    assert (
        "encoder.0.weight, encoder.1.weight, encoder.2.weight, encoder.3.weight, encoder.4.weight and 4 more"
        in found.message
    )
    assert found.since_step == 40
    assert found.evidence["parameters"] == NAMES


def test_a_layer_that_is_added_to_the_optimizer_resolves_the_alert() -> None:
    says = {60: [told("unoptimized", 0.37, 60)], 200: [told("unoptimized", 0.0, 200, names=[], count=0)]}
    changes = train(WrongOptimizer(), says)
    assert [change.kind for change in changes if change.kind != "update"] == ["fire", "resolve"]


@pytest.mark.parametrize("events", [[told("unoptimized", 0.004, 60)], [told("unmoved", 0.5, 60)], []])
def test_little_or_nothing_is_no_finding(events: list[Event]) -> None:
    assert train(WrongOptimizer(), {60: events}) == []


def test_an_event_that_makes_no_sense_is_no_finding() -> None:
    odd = Event(kind="parameters", time=START, step=60, data={"what": "unoptimized", "share": "much", "names": 3})
    assert train(WrongOptimizer(), {60: [odd]}) == []
    found = only(
        train(WrongOptimizer(), {60: [told("unoptimized", 7.0, 60, names=None, count="?", steps=None)]})
    ).finding
    assert found.evidence["share_pct"] == 100


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        ({"without_gradient": 900, "without_rate": 0}, "no gradient"),
        ({"without_gradient": 0, "without_rate": 900}, "learning rate"),
        ({"without_gradient": 0, "without_rate": 0}, ""),
    ],
)
def test_parameters_that_stand_still_are_named_with_the_cause(data: dict[str, int], cause: str) -> None:
    says = {step: [told("unmoved", 0.4, step, **data)] for step in (40, 80, 120)}
    change = only(train(UnchangedTensor(), says, {40: 0.4, 80: 0.4, 120: 0.4}))
    found = change.finding
    assert (found.severity, found.cause) == ("warning", cause)
    assert found.title == "40 % of the trainable numbers do not move"
    assert "encoder.0.weight" in found.message
    assert change.step == 80
    assert found.since_step == 20


def test_a_small_part_and_idle_experts_are_remarks() -> None:
    small = only(train(UnchangedTensor(), {}, {40: 0.03, 80: 0.03})).finding
    assert small.severity == "info"
    experts = [f"layers.{place}.experts.7.up" for place in range(4)]
    says = {step: [told("unmoved", 0.3, step, names=experts, count=4)] for step in (40, 80)}
    assert only(train(UnchangedTensor(), says, {40: 0.3, 80: 0.3})).finding.severity == "info"


@pytest.mark.parametrize(
    "shares",
    [
        {40: 0.0, 80: 0.0, 120: 0.0},
        {40: 0.4, 80: 0.0, 120: 0.4, 160: 0.0},
        {40: 1.0, 80: 1.0, 120: 1.0},
        {40: 0.005, 80: 0.005, 120: 0.005},
        {40: 0.9},
    ],
    ids=["all move", "by turns", "nothing moves at all", "an unused pooler", "one comparison"],
)
def test_healthy_parameters_are_silent(shares: dict[int, float]) -> None:
    assert train(UnchangedTensor(), {}, shares) == []


def test_parameters_that_move_again_resolve_the_alert() -> None:
    changes = train(UnchangedTensor(), {}, {40: 0.4, 80: 0.4, 120: 0.4, 160: 0.0})
    assert [change.kind for change in changes if change.kind != "update"] == ["fire", "resolve"]
