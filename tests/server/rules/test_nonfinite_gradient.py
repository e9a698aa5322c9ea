"""Rules on the gradients."""

from __future__ import annotations

import math

import pytest
from judging import judge_series, restored

from perfagent_server.alerts.state_machine import Change
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.model.nonfinite_gradient import NonfiniteGradient


def test_an_alert_on_two_series_is_over_after_as_many_sound_steps_as_any_other() -> None:
    """A step that both series tell of is one step."""
    bad = 10
    norms = [math.nan if step == bad else 1.0 for step in range(1, 201)]
    counts = [3.0 if step == bad else 0.0 for step in range(1, 201)]
    changes, _ = judge_series({"grad/norm": norms, "grad/nonfinite": counts}, rows=5, rules=[NonfiniteGradient()])
    assert [change.kind for change in changes] == ["fire", "resolve"]
    assert changes[1].step == bad + NonfiniteGradient.life.clear_steps


# --- the loss that follows


def spoilt(gradient_at: int, loss_at: int, *, rows: int = 1, **more: list[float]) -> tuple[list[Change], Evaluator]:
    """A gradient that is no number in one step, and a loss that is none from another on."""
    losses = [2.0] * (loss_at - 1) + [math.nan] * 4
    norms = [math.nan if step == gradient_at or step >= loss_at else 1.0 for step in range(1, len(losses) + 1)]
    return judge_series({"loss": losses, "grad/norm": norms, **more}, rows=rows)


@pytest.mark.parametrize("rows", [1, 100], ids=["frame by frame", "in one frame"])
def test_a_loss_after_a_bad_gradient_is_dated_to_the_gradient_and_is_the_same_alert(rows: int) -> None:
    changes, evaluator = spoilt(30, 31, rows=rows)
    assert len({change.alert for change in changes}) == 1
    found = evaluator.verdict()
    assert (found.rule, found.since_step) == ("nonfinite_loss", 30)
    assert found.title == "The loss became NaN in step 31, begun in step 30"
    assert "; the gradient of step 30 was NaN or infinite before, and its update spoilt the weights." in found.message
    assert (found.evidence["step"], found.evidence["began"]) == (31, {"first": 30, "last": 30})


def test_it_is_dated_over_a_restart_between_the_two() -> None:
    changes, evaluator = judge_series({"loss": [2.0] * 30, "grad/norm": [1.0] * 29 + [math.inf]})
    evaluator = restored(evaluator)
    more, evaluator = judge_series({"loss": [math.nan] * 3}, first_step=31, evaluator=evaluator)
    assert {change.alert for change in more} == {change.alert for change in changes}
    assert evaluator.verdict().since_step == 30


def test_finite_losses_in_between_show_that_the_gradient_did_no_harm() -> None:
    _, evaluator = spoilt(20, 31)
    found = evaluator.verdict()
    assert (found.since_step, found.title) == (31, "The loss became NaN in step 31")
    assert "began" not in found.evidence


def test_a_gradient_whose_step_was_skipped_began_nothing() -> None:
    skipped = [0.0] * 29 + [1.0] * 5
    _, evaluator = spoilt(30, 31, **{"amp/skipped": skipped, "amp/scale": [1024.0] * 34})
    assert evaluator.verdict().since_step == 31
