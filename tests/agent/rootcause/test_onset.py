"""When a NaN began: real trainings that go bad in step 15, judged by the server's rules, with gradients measured in every
tenth step or in every one; and what can be said where less is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from judging import START, make_evaluator
from torch import nn

from perfagent.rootcause.onset import onset, sentence
from perfagent.signals.gradient_schedule import Health
from perfagent.wire import Event, Finding, Group
from perfagent_server.alerts.state_machine import Change
from perfagent_server.rules.loss.nonfinite_loss import NonfiniteLoss
from perfagent_server.rules.model.nonfinite_gradient import NonfiniteGradient
from perfagent_server.store.codec.tail import TailGroup
from perfagent_server.store.stored import FromTail

BAD = 15


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """every(n): gradients are measured in every n-th step, whatever that costs."""

    def set_period(steps: int) -> None:
        monkeypatch.setattr(Health, "_next_pass", lambda _health, _p, after, _step_ns: (after // steps + 1) * steps)

    return set_period


def bad_gradient(of: nn.Parameter, row: int = 0) -> Any:
    """A hook by which the gradient of a parameter has one value that is none."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[row] = math.nan
        return gradient

    return of.register_hook(spoil)


def judged(job: Any) -> tuple[list[Change], list[Finding]]:
    """The alerts that the server makes of what a training has sent: each step in a frame of its own, as of a slow
    training, and what the agent found after them."""
    judge = make_evaluator(rules=(NonfiniteLoss(), NonfiniteGradient()))
    changes: list[Change] = []
    rows = sorted(job.recorded.rows, key=lambda row: row[0])
    for number, (step, values) in enumerate(rows, 1):
        columns = {name: [float(value)] for name, value in values.items()}
        group = TailGroup.of_group(Group([step], [START + step], [float(step)], columns))  # type: ignore[arg-type]
        changes += judge.take(FromTail(number, "r", 1, 0, "s", number, START + step, [group], []))
    for kind, data, step in job.sender.events:
        if kind == "finding":
            told = Event(kind=kind, time=START + 99, step=step, data={**data, "evidence": {**data["evidence"]}})
            number = judge.upto + 1
            changes += judge.take(FromTail(number, "r", 1, 0, "s", number, START + 99, [], [told]))
    return changes, judge.findings()


def train_on(job: Any, steps: int = 4) -> tuple[Finding, dict[str, Any]]:
    """The one alert after some more steps, and what the agent found."""
    job.steps(steps)
    job.recorded.finish()
    changes, findings = judged(job)
    assert len({change.alert for change in changes}) == 1, "one trouble is one alert"
    found = findings[0]
    assert found.rule == "nonfinite_loss"
    (cause,) = found.evidence["causes"]
    return found, cause


@pytest.mark.parametrize("period", [1, 10])
def test_what_begins_in_the_loss_alone_is_of_that_step(train, every, period):
    every(period)
    job = train()
    job.steps(BAD - 1)
    job.spoil = lambda loss: (loss * 0) / (loss.detach() * 0)
    job.step()
    job.spoil = lambda loss: loss
    found, cause = train_on(job)
    assert (found.since_step, found.title) == (BAD, "The loss became NaN in step 15")
    assert (cause["began"], cause["cause"]) == ({"first": BAD, "last": BAD}, "operator")


@pytest.mark.parametrize("period", [1, 10])
def test_a_bad_batch_is_of_its_step(train, every, period):
    every(period)
    job = train()
    job.steps(BAD - 1)
    job.step(torch.full((6, 8), math.nan))
    found, cause = train_on(job)
    assert (found.since_step, cause["began"], cause["cause"]) == (BAD, {"first": BAD, "last": BAD}, "batch")


@pytest.mark.parametrize("period", [1, 10])
def test_a_module_that_makes_it_is_named_with_its_operator_and_step(train, every, period):
    every(period)
    job = train()
    job.steps(BAD - 1)
    block = job.model.blocks[1]
    handle = block.act.register_forward_hook(lambda _module, _inputs, output: (output - 100).log())
    job.step()
    handle.remove()
    found, cause = train_on(job)
    assert (found.since_step, cause["began"]) == (BAD, {"first": BAD, "last": BAD})
    assert (cause["operator"]["operator"], cause["after_module"]) == ("Log", "blocks.1.linear")


def test_a_bad_gradient_that_was_measured_dates_the_loss_of_the_next_step_and_names_its_layer(train, every):
    every(1)
    job = train()
    job.steps(BAD - 1)
    handle = bad_gradient(job.model.blocks[1].linear.weight)
    job.step()
    handle.remove()
    found, cause = train_on(job)
    assert (found.since_step, found.title) == (BAD, "The loss became NaN in step 16, begun in step 15")
    assert cause["began"] == {"first": BAD, "last": BAD, "by": "gradient", "measured": True}
    assert (cause["module"], cause["parameter"]) == ("blocks.1.linear", "blocks.1.linear.weight")
    assert (
        "the gradient of 'blocks.1.linear.weight' of module 'blocks.1.linear' (Linear), and no other, was non-finite"
        in found.message
    )


def test_a_bad_gradient_that_was_not_measured_is_dated_by_the_optimizers_averages(train, every):
    every(10)
    job = train()
    job.steps(BAD - 1)
    handle = bad_gradient(job.model.blocks[1].linear.weight)
    job.step()
    handle.remove()
    found, cause = train_on(job)
    assert (found.since_step, found.title) == (BAD, "The loss became NaN in step 16, begun in step 15")
    assert (cause["step"], cause["began"]) == (16, {"first": BAD, "last": BAD, "by": "gradient"})
    assert cause["parameter"] == "blocks.1.linear.weight"
    assert "It began in step 15, whose gradients were not measured: the optimizer's state shows" in found.message


def test_the_norm_that_clipping_computes_dates_it_too(train, every):
    every(1000)
    job = train()
    step, job.optimizer.step = job.optimizer.step, lambda: None

    def clipped_step() -> None:
        nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        step()

    job.optimizer.step = clipped_step
    job.steps(BAD - 1)
    handle = bad_gradient(job.model.blocks[1].linear.weight)
    job.step()
    handle.remove()
    found, cause = train_on(job)
    assert found.since_step == BAD
    assert cause["began"]["first"] == cause["began"]["last"] == BAD


def test_a_weight_that_was_written_is_not_blamed_on_a_gradient(train, every):
    every(10)
    job = train()
    job.steps(BAD)
    with torch.no_grad():
        job.model.blocks[1].linear.weight[0, 0] = math.nan
    found, cause = train_on(job)
    assert cause["began"] == {"first": BAD, "last": BAD + 1, "by": "weights"}
    assert "no gradient, did it" in found.message
    assert found.since_step == BAD + 1, "the first step in which it is known to be so"


class Words(nn.Module):
    """Of an embedding a batch reads some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.row = nn.Embedding(50, 16), nn.Linear(16, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.randint(1, 40, (x.shape[0], 5))
        rows[0, 0] = self.row
        return self.head(self.embed(rows).mean(1))


def test_where_a_bad_row_is_read_steps_later_both_ends_are_said(train, every):
    every(10)
    job = train(Words())
    job.steps(BAD - 1)
    job.model.row = 45
    handle = bad_gradient(job.model.embed.weight, 45)
    job.step()
    handle.remove()
    job.model.row = 0
    job.steps(3)
    job.model.row = 45
    found, cause = train_on(job)
    assert (cause["step"], cause["module"]) == (19, "embed")
    assert cause["began"] == {"first": 12, "last": 18, "by": "gradient"}, "gradients were good in step 11"
    assert "It began with the update of one of the steps 12 to 18" in found.message
    assert found.since_step == 19


def test_an_overflow_that_the_scaler_skips_is_no_alert(train, every):
    every(1)
    job = train()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(1, 31):
        handle = bad_gradient(job.model.blocks[1].linear.weight) if step == BAD else None
        x, y = job.batch()
        job.optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(job.model(x), y)).backward()
        if handle is not None:
            handle.remove()
        scaler.step(job.optimizer)
        scaler.update()
        job.look()
    job.recorded.finish()
    assert scaler.get_scale() == 2.0**9, "it has skipped one"
    assert judged(job)[0] == []
    assert job.events("finding") == []


def test_a_loss_that_stays_nan_costs_what_any_step_does(train, every):
    """Every step was measured again, and its bad numbers counted: 10 to 25 % of the training's time."""
    every(1000)
    job = train()
    job.steps(BAD - 1)
    job.spoil = lambda loss: loss * math.nan
    job.steps(100)
    job.recorded.finish()
    measured = [step for step, values in job.recorded.rows if "grad/nonfinite" in values]
    assert [step for step in measured if step >= BAD] == [BAD]
    assert len(job.events("finding")) == 1
    rows = [step for step, values in job.recorded.rows if "loss" in values]
    assert rows == [*range(1, BAD + 100)], "and none of its steps is missing"


# --- by what is known


def history(*steps: tuple[int, float], **gradients: float) -> list[dict[str, float]]:
    """(step, loss); gradients: sN=norm."""
    return [
        {"step": step, "loss": loss, **({"grad/norm": gradients[f"s{step}"]} if f"s{step}" in gradients else {})}
        for step, loss in steps
    ]


DAMAGED = {"step": 9, "parameters_after": {"of": 4, "nonfinite": 4}, "looked_after_step": 10, "cause": "spread"}
"""A loss on a device that was read when the weights had been spoilt already."""


@pytest.mark.parametrize(
    ("gradients", "first", "last", "says"),
    [
        ({}, 8, 9, "It began in step 9 or in the update of step 8, whose gradients were not measured"),
        ({"s8": 1.0}, 9, 9, "It began in step 9: the gradients of step 8 were finite."),
        ({"s8": math.inf}, 8, 8, "It began in step 8, with a gradient that was non-finite."),
        ({"s7": 1.0}, 8, 9, "It began in step 9 or in the update of step 8"),
    ],
    ids=["not measured", "measured and good", "measured and bad", "measured before"],
)
def test_a_loss_that_is_read_late_is_dated_as_far_as_it_can_be(gradients, first, last, says):
    steps = history((7, 1.0), (8, 1.0), (9, math.nan), **gradients)
    began = onset(DAMAGED, steps, first_step=1, watched=False)
    assert began is not None
    assert (began["first"], began["last"]) == (first, last)
    assert sentence(began, {**DAMAGED, "history": steps}).startswith(says)


def test_losses_that_are_known_now_and_then_leave_a_longer_stretch():
    began = onset(DAMAGED, history((4, 1.0), (9, math.nan)), first_step=1, watched=False)
    assert began == {"first": 4, "last": 9}
    assert "in step 9 or in an update from step 4 on" in sentence(began, DAMAGED)


def test_weights_that_are_bad_in_the_first_step_were_not_made_so_by_a_step():
    found = {"step": 1, "parameters_before": {"nonfinite": 1}, "cause": "parameter"}
    assert onset(found, [], first_step=1, watched=True) is None


def test_weights_that_are_good_after_the_step_were_never_spoilt():
    found = {"step": 9, "parameters_after": {"nonfinite": 0}, "looked_after_step": 9, "cause": "unknown"}
    assert onset(found, history((8, 1.0), s8=math.nan), first_step=1, watched=False) == {"first": 9, "last": 9}


def test_a_gradient_of_a_step_that_the_scaler_skipped_spoilt_nothing():
    steps = [
        {"step": 7, "loss": 1.0, "amp/skipped": 0.0},
        {"step": 8, "loss": 1.0, "amp/skipped": 1.0, "grad/norm": math.inf},
        {"step": 9, "loss": math.nan, "amp/skipped": 1.0},
    ]
    assert onset(DAMAGED, steps, first_step=1, watched=False) == {"first": 9, "last": 9}
