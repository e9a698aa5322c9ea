"""The verdict of a run in which no alert is open: its loss is no number, its step is mostly unaccounted for, or it is
healthy."""

from __future__ import annotations

import math

import pytest
from judging import fired, frame, judge_series, state

from perfagent.wire import Finding


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
    [(1, "Too few steps to judge, nothing wrong so far"), (9, "Too few steps"), (10, "Nothing holds this run back")],
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
    assert found.rule == ("hang" if said else "healthy")
    assert found.severity == "info"
    assert found.message.startswith(
        f"No step has ended for {said}, since step 40" if said else "Nothing holds this run back"
    )
    assert ("perfagent stacks RUN" in found.fix) == bool(said)
    steps = {"loss": [3.0], "step_time_s": [alive - judge.window.now + step_s]}
    judge.take(frame(steps, [41], ident=judge.upto + 1, received=alive + 1))
    assert judge.verdict().message.startswith("Nothing holds this run back: step 41")
    judge.take(frame({}, [], ident=judge.upto + 1, received=alive + 900, events=[state("finished", step=41)]))
    assert judge.verdict().message.startswith("Nothing held this run back")


def verdict_of(columns: dict[str, list[float]], *, step_s: float = 1.0, end: bool = False) -> Finding:
    _, judge = judge_series(columns, step_s=step_s, rows=10)
    if end:
        step = len(columns["loss"])
        judge.take(frame({}, [], ident=judge.upto + 1, events=[state("finished", step=step)]))
    return judge.verdict()


def phases(share: dict[str, float], *, steps: int = 200, step_s: float = 1.0) -> dict[str, list[float]]:
    """Steps of which each phase takes its share, and the forward pass the rest."""
    columns = {f"phase/{phase}_s": [part * step_s] * steps for phase, part in share.items()}
    columns["phase/forward_s"] = [step_s * (1 - sum(share.values()))] * steps
    return {"loss": [3.0 - 0.005 * step for step in range(steps)], "step_time_s": [step_s] * steps} | columns


@pytest.mark.parametrize("end", [False, True], ids=["trains", "ended"])
@pytest.mark.parametrize(
    ("phase", "part", "rule"),
    [
        ("data", 0.12, "data_bound"),
        ("eval", 0.11, "eval_bound"),
        ("checkpoint", 0.11, "checkpoint_bound"),
        ("other", 0.4, "unmeasured_time"),
        ("comm", 0.4, "comm_bound"),
        ("h2d", 0.4, "h2d_bound"),
        ("plots", 0.2, "unmeasured_time"),
    ],
)
def test_a_run_that_spends_much_time_beside_training_is_not_called_healthy(
    phase: str, part: float, rule: str, end: bool
) -> None:
    found = verdict_of(phases({phase: part}), end=end)
    assert found.rule == rule
    assert f"{100 * part:.0f} %" in found.message
    assert found.fix


@pytest.mark.parametrize("end", [False, True], ids=["trains", "ended"])
@pytest.mark.parametrize(
    ("phase", "part"), [("data", 0.05), ("eval", 0.08), ("other", 0.25), ("comm", 0.2), ("plots", 0.05)]
)
def test_a_little_time_beside_training_is_healthy(phase: str, part: float, end: bool) -> None:
    assert verdict_of(phases({phase: part}), end=end).rule == "healthy"


def test_the_wall_time_of_a_verdict_adds_up_to_all_of_it() -> None:
    found = verdict_of(phases({"data": 0.05, "eval": 0.06, "checkpoint": 0.03, "other": 0.1, "comm": 0.1}))
    assert found.rule == "eval_bound", "together they are more than a tenth, and evaluations are most of it"
    shares = found.evidence["wall_time_pct"]
    assert sum(shares.values()) == pytest.approx(100.0, abs=0.5)
    assert shares["training"] == pytest.approx(66.0, abs=0.2)
    assert shares["evaluation"] == pytest.approx(6.0, abs=0.2)


def test_a_pause_between_two_attempts_is_told_as_such() -> None:
    _, judge = judge_series(phases({}, steps=100), step_s=1.0)
    again = judge.window.now + 60.0
    judge.take(frame({}, [], attempt=2, ident=judge.upto + 1, received=again, events=[state("starting")]))
    columns = {name: values[0:1] for name, values in phases({}).items()}
    for step in range(101, 141):
        judge.take(frame(columns, [step], attempt=2, ident=judge.upto + 1, received=again + step - 100))
    found = judge.verdict()
    assert found.rule == "process_crash"
    assert found.severity == "info"
    assert "stood still for 60 s of the 200 s" in found.message


def test_a_script_that_waits_for_busy_gpus_is_not_told_that_its_step_is_elsewhere() -> None:
    columns = phases({"other": 0.95}, step_s=0.1) | {"gpu/utilization_pct": [99.0] * 200}
    assert verdict_of(columns, step_s=0.1).rule == "healthy"


def test_the_loop_of_a_toy_is_healthy() -> None:
    assert verdict_of(phases({"other": 0.9}, step_s=0.0009), step_s=0.0009).rule == "healthy"


def test_an_ended_run_says_what_happened_in_it_and_healed() -> None:
    losses = [2.0 + 0.01 * ((7 * step) % 5) for step in range(600)]
    for step in range(400, 430):
        losses[step] += 2.0
    changes, judge = judge_series({"loss": losses}, rows=10)
    [spike] = fired(changes, "loss_spike")
    assert "It also happened" not in judge.verdict().message
    judge.take(frame({}, [], ident=judge.upto + 1, events=[state("finished", step=600)]))
    found = judge.verdict()
    assert f"It also happened: {spike.finding.title} (loss_spike, from step {spike.finding.since_step}" in found.message


@pytest.mark.parametrize(("padding_pct", "rule"), [(89.0, "tokens_wasted"), (31.0, "healthy")])
def test_padding_that_costs_more_than_a_third_of_the_step_is_not_healthy(padding_pct: float, rule: str) -> None:
    _, judge = judge_series(_stepping(0.0, steps=200, **{"batch/padding_pct": [padding_pct] * 200}))
    found = judge.verdict()
    assert (found.rule, found.severity) == (rule, "info")
    assert f"{padding_pct:.0f} %" in found.message
