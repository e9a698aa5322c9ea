"""When a NaN began: real trainings that go bad in step 15, judged by the server's rules, with gradients measured in every
tenth step or in every one; and what can be said where less is known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from agent.causes.conftest import Training
from judging import START, make_evaluator
from torch import nn

from perfagent.causes.onset import onset
from perfagent.wire import Event, Finding, Group
from perfagent_server.alerts.state_machine import Change
from perfagent_server.rules.loss.nonfinite_loss import NonfiniteLoss
from perfagent_server.rules.model.nonfinite_gradient import NonfiniteGradient
from perfagent_server.store.codec.tail import TailGroup
from perfagent_server.store.stored import FromTail

BAD = 15
INF, NAN = math.inf, math.nan


def bad_gradient(job: Training) -> None:
    """A step in which the gradient of a parameter has a row that is no number."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[0] = NAN
        return gradient

    handle = job.model.blocks[1].linear.weight.register_hook(spoil)
    job.step()
    handle.remove()


def judged(job: Training) -> tuple[list[Change], list[Finding]]:
    """The alerts that the server makes of what a training has sent: each step in a frame of its own, as of a slow
    training, and what the agent found after them."""
    judge = make_evaluator(rules=(NonfiniteLoss(), NonfiniteGradient()))
    changes: list[Change] = []
    rows = sorted(job.recorded.rows, key=lambda row: row[0])
    for number, (step, values) in enumerate(rows, 1):
        columns = {name: [float(value)] for name, value in values.items()}
        group = TailGroup.of_group(Group([step], [START + step], [float(step)], columns))
        changes += judge.take(FromTail(number, "r", 1, 0, "s", number, START + step, [group], []))
    for kind, data, step in job.sender.events:
        if kind == "finding":
            told = Event(kind=kind, time=START + 99, step=step, data={**data, "evidence": {**data["evidence"]}})
            number = judge.upto + 1
            changes += judge.take(FromTail(number, "r", 1, 0, "s", number, START + 99, [], [told]))
    return changes, judge.findings()


def started(train: Any, every: int) -> Training:
    """At the end of the last good step."""
    job: Training = train()
    job.every = every
    job.steps(BAD - 1)
    return job


def train_on(job: Training) -> tuple[Finding, dict[str, Any]]:
    """The one alert after some more steps, and what the agent found."""
    job.steps(4)
    job.recorded.finish()
    changes, (found, *_) = judged(job)
    assert (len({change.alert for change in changes}), found.rule) == (1, "nonfinite_loss"), "one trouble is one alert"
    (cause,) = found.evidence["causes"]
    return found, cause


@pytest.mark.parametrize("measured", [True, False])
def test_a_bad_gradient_dates_the_loss_of_the_next_step(train, measured):
    """If it was not measured, the optimizer's averages show it."""
    job = started(train, 1 if measured else 10)
    bad_gradient(job)
    found, cause = train_on(job)
    assert (found.since_step, found.title) == (BAD, "The loss became NaN in step 16; it began in step 15")
    more = {"measured": True} if measured else {}
    assert cause["began"] == {"first": BAD, "last": BAD, "by": "gradient", **more}
    # a gradient that is read before the next backward pass is asked about at once
    assert cause["step"] in ((BAD, BAD + 1) if measured else (BAD + 1,))
    assert (cause["module"], cause["parameter"]) == ("blocks.1.linear", "blocks.1.linear.weight")


def test_a_weight_that_was_written_is_not_blamed_on_a_gradient(train):
    job = started(train, 10)
    job.step()
    with torch.no_grad():
        job.model.blocks[1].linear.weight[0, 0] = NAN
    found, cause = train_on(job)
    assert cause["began"] == {"first": BAD, "last": BAD + 1, "by": "weights"}
    assert found.since_step == BAD + 1, "the first step in which it is known to be so"


def test_an_overflow_that_the_scaler_skips_is_no_alert(train):
    job = train()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(1, 31):
        x, y = job.batch()
        job.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(job.model(x), y)
        scaler.scale(loss).backward()
        if step == BAD:
            job.model.blocks[1].linear.weight.grad[0] = INF
        scaler.step(job.optimizer)
        scaler.update()
        job.look()
    job.recorded.finish()
    assert scaler.get_scale() == 2.0**9, "it has skipped one"
    assert judged(job)[0] == job.events("finding") == []


def test_a_loss_that_stays_nan_costs_what_any_step_does(train):
    """Every step was measured again, and its bad numbers counted: 10 to 25 % of the training's time."""
    job = started(train, 1000)
    job.spoil = lambda loss: loss * NAN
    job.steps(60)
    job.recorded.finish()
    measured = [step for step, values in job.recorded.rows if "grad/nonfinite" in values]
    assert [step for step in measured if step >= BAD] == [BAD]
    assert job.finding()
    rows = [step for step, values in job.recorded.rows if "loss" in values]
    assert rows == [*range(1, BAD + 60)], "and none of its steps is missing"


# --- by what is known


def row(step: int, loss: float = 1.0, **more: float) -> dict[str, float]:
    return {"step": step, "loss": loss, **{name.replace("__", "/"): value for name, value in more.items()}}


DAMAGED = {"step": 9, "parameters_after": {"of": 4, "nonfinite": 4}, "looked_after_step": 10, "cause": "spread"}
"""A loss on a device that was read when the weights had been spoilt already."""


@pytest.mark.parametrize(
    ("before", "first", "last"),
    [
        ([row(7), row(8)], 8, 9),
        ([row(7), row(8, grad__norm=1.0)], 9, 9),
        ([row(7), row(8, grad__norm=INF)], 8, 8),
        ([row(7, grad__norm=1.0), row(8)], 8, 9),
        ([row(4)], 4, 9),
        ([row(7, amp__skipped=0.0), row(8, amp__skipped=1.0, grad__norm=INF)], 9, 9),
    ],
    ids=["not measured", "good", "bad", "measured before", "losses now and then", "skipped by a scaler"],
)
def test_a_loss_read_late_is_dated_as_far_as_it_can_be(before, first, last):
    steps = [*before, row(9, NAN)]
    began = onset(DAMAGED, steps, first_step=1, watched=False)
    assert began is not None
    assert (began["first"], began["last"]) == (first, last)
