"""Rules on the gradients."""

from __future__ import annotations

import math

import pytest
from judging import fired, frame, judge_series

from perfagent_server.rules.evaluator import Evaluator
from perfagent_server.rules.gradients import NonfiniteGradient


def test_an_alert_on_two_series_is_over_after_as_many_sound_steps_as_any_other() -> None:
    """A step that both series tell of is one step."""
    bad = 10
    norms = [math.nan if step == bad else 1.0 for step in range(1, 201)]
    counts = [3.0 if step == bad else 0.0 for step in range(1, 201)]
    changes, _ = judge_series({"grad/norm": norms, "grad/nonfinite": counts}, rows=5, rules=[NonfiniteGradient()])
    assert [change.kind for change in changes] == ["fire", "resolve"]
    assert changes[1].step == bad + NonfiniteGradient.life.clear_steps


def scaled(begin: float, skipped: set[int], steps: int = 120) -> dict[str, list[float]]:
    """As the agent tells of it: the loss is finite, and of a step that the scaler skipped there is no norm."""
    series: dict[str, list[float]] = {"loss": [], "amp/scale": [], "amp/skipped": []}
    scale, count = begin, 0.0
    for step in range(1, steps + 1):
        series["loss"].append(1.0)
        series["amp/scale"].append(scale)
        if step in skipped:
            scale, count = scale / 2, count + 1
        series["amp/skipped"].append(count)
    return series


@pytest.mark.parametrize("rows", [1, 7, 50, 120])
def test_a_scaler_that_finds_no_scale_any_more_is_told_although_no_norm_was_sent(rows: int) -> None:
    """Without it the run was healthy: 80 steps, none of which changed a weight, down to a scale of 1e-19."""
    changes, _ = judge_series(scaled(2.0**16, set(range(41, 121))), rows=rows)
    (alert,) = fired(changes)
    assert (alert.finding.rule, alert.finding.since_step) == ("nonfinite_gradient", 41)
    assert "steps in a row, from step 41 on" in alert.finding.message
    assert "learning rate" not in alert.finding.fix


def test_a_collapse_is_over_when_steps_are_taken_again() -> None:
    changes, _ = judge_series(scaled(2.0**16, set(range(41, 70)), steps=200), rows=5)
    assert [change.kind for change in changes if change.kind != "update"] == ["fire", "resolve"]
    assert changes[-1].step == 69 + NonfiniteGradient.life.clear_steps


@pytest.mark.parametrize("begin", [1.0, 2.0**16])
def test_single_steps_that_a_scaler_skips_are_no_fault_also_where_it_began_at_one(begin: float) -> None:
    changes, _ = judge_series(scaled(begin, {10, 30, 31, 60}), rows=5)
    assert changes == []


def test_a_count_of_skipped_steps_that_goes_on_in_the_next_block_of_a_frame_is_no_skipped_step() -> None:
    """A frame holds a group of rows for each set of columns; one ends with the count with which the next begins."""
    series = scaled(1.0, {30, 60})
    whole = frame(series, range(1, 121))
    blocks = [frame({n: v[a:b] for n, v in series.items()}, range(a + 1, b + 1)).groups[0] for a, b in ((0, 63), (63, 120))]
    for groups in (blocks, blocks[::-1], [*blocks, blocks[1]]):
        whole.groups[:] = groups
        judge = Evaluator("r")
        assert judge.take(whole) == []
        assert [bad.step for bad in judge.window.bad["gradient"]] == [30, 60]
