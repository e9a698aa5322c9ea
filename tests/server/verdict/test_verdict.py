"""The verdict of a run in which no alert is open: its loss is no number, its step is mostly unaccounted for, or it is
healthy."""

from __future__ import annotations

import math

import pytest
from judging import fired, frame, judge_series, state, told


@pytest.mark.parametrize("name", ["loss", "train/loss"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("count", [1, 10])
def test_a_nan_whose_alert_somebody_closed_does_not_make_a_run_healthy(name: str, count: int, bad: float) -> None:
    changes, judge = judge_series({name: [2.0] * 50 + [bad] * count})
    (alert,) = fired(changes)
    assert judge.resolve(alert.alert, judge.window.now, "by hand")
    found = judge.verdict()
    assert (found.rule, found.severity, found.since_step) == ("nonfinite_loss", "critical", 51)
    assert found.message == f"{'The loss' if name == 'loss' else name} is NaN or infinite since step 51."


@pytest.mark.parametrize(
    ("steps", "said"),
    [(1, "Too early to tell, nothing wrong so far"), (9, "Too early"), (10, "Nothing holds this run back")],
)
def test_few_steps_are_no_proof_of_health(steps: int, said: str) -> None:
    _, judge = judge_series({"loss": [3.0] * steps})
    assert judge.verdict().message.startswith(said)


def test_a_run_whose_newest_step_the_scaler_skipped_is_healthy_by_its_last_finite_loss() -> None:
    series = {"loss": [3.0] * 49 + [math.nan], "amp/scale": [1024.0] * 49 + [512.0], "amp/skipped": [0.0] * 49 + [1.0]}
    changes, judge = judge_series(series)
    assert changes == []
    assert judge.verdict().message == "Nothing holds this run back: step 50, loss 3 (from 3)."


def _stepping(other_s: float, step_s: float = 0.1, *, steps: int = 40, **more: list[float]) -> dict[str, list[float]]:
    return {
        "loss": [3.0] * steps, "step_time_s": [step_s] * steps, "phase/forward_s": [step_s - other_s] * steps,
        "phase/other_s": [other_s] * steps, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("step_s", "after_s", "said"), [(0.1, 59, ""), (0.1, 93, "93 s"), (20, 93, ""), (20, 101, "101 s")]
)
def test_a_run_that_is_heard_and_ends_no_step_is_not_told_that_nothing_holds_it_back(
    step_s: float, after_s: float, said: str
) -> None:
    _, judge = judge_series(_stepping(0.0, step_s), step_s=step_s)
    alive = judge.window.now + after_s
    judge.take(frame({"host/load1": [0.0]}, [40], ident=judge.upto + 1, received=alive))
    found = judge.verdict()
    assert found.rule == "healthy"
    assert found.message.startswith(f"No step has ended for {said}: step 40" if said else "Nothing holds this run back")
    assert ("perfagent stacks RUN" in found.fix) == bool(said)
    steps = {"loss": [3.0], "step_time_s": [alive - judge.window.now + step_s]}
    judge.take(frame(steps, [41], ident=judge.upto + 1, received=alive + 1))
    assert judge.verdict().message.startswith("Nothing holds this run back: step 41")
    judge.take(frame({}, [], ident=judge.upto + 1, received=alive + 900, events=[state("finished", step=41)]))
    assert judge.verdict().message.startswith("Nothing held this run back")


def test_a_run_most_of_whose_step_no_phase_accounts_for_is_told_so_and_how_to_find_out() -> None:
    series = _stepping(0.095)
    _, judge = judge_series(series)
    found = told(judge, series)
    assert (found.rule, found.severity) == ("healthy", "info")
    assert found.message == (
        "Most of the step (95 %) is outside of data, forward, backward and optimizer: step 40, loss 3 (from 3), "
        "100 ms a step (median of the newest 40 steps)."
    )
    assert found.evidence["other_share_pct"] == pytest.approx(95.0)
    assert "run.phase(" in found.fix
    assert "perfagent profile RUN" in found.fix
    judge.take(frame({}, [], ident=judge.upto + 1, events=[state("finished", step=40)]))
    found = told(judge, series, whole_run=True)
    assert found.message.startswith("Most of the step (95 %) was outside of data, forward")
    assert found.message.endswith("100 ms a step (median of the whole run).")


def test_the_share_and_the_time_of_a_healthy_verdict_are_those_of_the_window_that_everybody_sees() -> None:
    _, judge = judge_series(_stepping(0.095))
    found = told(judge, _stepping(0.14, 0.2))
    assert found.message.startswith("Most of the step (70 %) is outside of")
    assert "200 ms a step" in found.message
    found = told(judge, _stepping(0.04))
    assert found.message.startswith("Nothing holds this run back: step 40"), (
        "most of the newest steps, not of the window"
    )


def test_time_outside_of_the_phases_is_not_told_where_it_is_little_rare_or_unknown() -> None:
    one_long_pause = [0.005] * 39 + [9.0]
    rare = _stepping(0.005) | {"phase/other_s": one_long_pause, "step_time_s": [0.1] * 39 + [9.1]}
    for series in (_stepping(0.04), _stepping(0.0009, 0.001), _stepping(0.095, steps=9), rare, {"loss": [3.0] * 40}):
        found = told(judge_series(series)[1], series)
        assert not found.message.startswith("Most of the step"), found.message
        assert not found.fix
        assert "other_share_pct" not in found.evidence


def test_a_script_that_waits_for_busy_gpus_is_not_told_that_its_step_is_elsewhere() -> None:
    series = _stepping(0.095, steps=200, **{"gpu/utilization_pct": [99.0] * 200})
    assert told(judge_series(series)[1], series).message.startswith("Nothing holds this run back")
