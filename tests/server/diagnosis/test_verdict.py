"""The verdict of a run whose loss is no number now, with no alert that says so."""

from __future__ import annotations

import math

import pytest
from judging import fired, judge_series

from perfagent_server.diagnosis.verdict import verdict


@pytest.mark.parametrize("name", ["loss", "train/loss"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("count", [1, 10])
def test_a_nan_whose_alert_somebody_closed_does_not_make_a_run_healthy(name: str, count: int, bad: float) -> None:
    changes, judge = judge_series({name: [2.0] * 50 + [bad] * count})
    (alert,) = fired(changes)
    assert judge.resolve(alert.alert, judge.window.now, "by hand")
    found = verdict(judge)
    assert (found.rule, found.severity, found.since_step) == ("nonfinite_loss", "critical", 51)
    assert found.message == f"{'The loss' if name == 'loss' else name} is NaN or infinite since step 51."


@pytest.mark.parametrize(
    ("steps", "said"), [(1, "Too early to tell, nothing wrong so far"), (9, "Too early"), (10, "Nothing holds this run back")]
)
def test_few_steps_are_no_proof_of_health(steps: int, said: str) -> None:
    _, judge = judge_series({"loss": [3.0] * steps})
    assert verdict(judge).message.startswith(said)


def test_a_run_whose_newest_step_the_scaler_skipped_is_healthy_by_its_last_finite_loss() -> None:
    series = {"loss": [3.0] * 49 + [math.nan], "amp/scale": [1024.0] * 49 + [512.0], "amp/skipped": [0.0] * 49 + [1.0]}
    changes, judge = judge_series(series)
    assert changes == []
    assert verdict(judge).message == "Nothing holds this run back: step 50, loss 3 (from 3)."
