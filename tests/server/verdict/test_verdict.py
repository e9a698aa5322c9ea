"""The verdict of a run in which no alert is open: its loss is no number, its step is mostly unaccounted for, or it is
healthy."""

from __future__ import annotations

import math
import random

import pytest
from judging import fired, frame, judge_series, make_evaluator, state

from perfagent.wire import Finding
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.verdict.verdict import Happened, verdict, worst_first


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
    found = judge.verdict()
    assert found.message.startswith(said)
    assert str(found).startswith("healthy: " if steps >= 10 else "unknown: ")


def test_a_run_of_which_nothing_came_is_not_called_healthy() -> None:
    assert str(make_evaluator().verdict()).startswith("unknown: Nothing to judge yet")


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
        judge.take(
            frame(
                columns, [step], attempt=2, ident=judge.upto + 1, received=again + step - 100, step_s=1.0, late_s=60.0
            )
        )
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


def test_what_healed_before_the_end_is_told_once() -> None:
    """A rule that held most of the time is a finding of an ended run, too."""
    _, judge = judge_series({"loss": [2.0] * 100})
    judge.take(frame({}, [], ident=judge.upto + 1, events=[state("finished", step=100)]))
    worst = Finding(rule="nonfinite_loss", severity="critical", message="The loss became NaN.", since_step=100)
    slow = Finding(rule="throughput_regression", severity="warning", message="Steps take longer.", since_step=90)
    told = verdict(judge.window, [worst, slow], happened=[Happened(slow, 99)]).message
    assert told.count("throughput_regression") == 1
    assert "from step 90; over by step 99" in told


@pytest.mark.parametrize(("padding_pct", "rule"), [(89.0, "tokens_wasted"), (31.0, "healthy")])
def test_padding_that_costs_more_than_a_third_of_the_step_is_not_healthy(padding_pct: float, rule: str) -> None:
    _, judge = judge_series(_stepping(0.0, steps=200, **{"batch/padding_pct": [padding_pct] * 200}))
    found = judge.verdict()
    assert (found.rule, found.severity) == (rule, "info")
    assert f"{padding_pct:.0f} %" in found.message


@pytest.mark.parametrize(("end", "rule"), [(4.0, "loss_divergence"), (1.5, "healthy")])
def test_a_run_whose_loss_ends_above_where_it_began_is_not_healthy(end: float, rule: str) -> None:
    """Too short to be sure that it diverged."""
    losses = [2.3 * 0.93**step for step in range(40)] + [0.13] * 100 + [end] * 9
    _, judge = judge_series({"loss": losses})
    found = judge.verdict()
    assert (found.rule, found.severity) == (rule, "info")
    if rule != "healthy":
        assert "is at 4 (median of the newest 9 values), above the 1.989 of its first steps" in found.message


def falling(*parts: tuple[float, float, int]) -> list[float]:
    """Stretches from one loss to another, in so many steps."""
    return [start + (end - start) * step / steps for start, end, steps in parts for step in range(steps)]


@pytest.mark.parametrize(
    "losses",
    [
        falling((2.3, 22.3, 30)),
        falling((2.3, 3.3, 150)),
        falling((2.3, 2.3, 100), (2.3, 4.6, 200)),
        falling((2.3, 2.0, 100), (2.0, 6.0, 40), (6.0, 6.01, 200)),
        falling((3.0, 1.5, 300), (1.5, 4.5, 300)),
    ],
    ids=["at once", "slowly", "from a level", "to a level", "after it fell"],
)
def test_a_run_whose_loss_grew_is_told_so_whatever_way_it_took(losses: list[float]) -> None:
    found = verdict_of({"loss": losses})
    assert found.rule == "loss_divergence"
    assert "heals by itself" not in found.fix


@pytest.mark.parametrize("seed", range(3))
def test_losses_of_gans_and_policies_may_be_above_where_they_began(seed: int) -> None:
    draw = random.Random(seed)
    gan = [(0.7 + 0.5 * min(1.0, step / 100)) * math.exp(0.15 * draw.gauss(0.0, 1.0)) for step in range(600)]
    policy = [draw.gauss(0.0, 0.1) for _ in range(600)]
    assert verdict_of({"loss": gan}).rule == "healthy"
    assert verdict_of({"loss": policy}).rule == "healthy"


def test_what_was_open_when_a_run_was_killed_is_told_beside_its_end() -> None:
    _, judge = judge_series({"loss": [2.0] * 100 + [math.nan] * 100})
    killed = state("killed", step=200, reason="SIGKILL")
    judge.take(frame({}, [], ident=judge.upto + 1, events=[killed]))
    found = judge.verdict()
    assert found.rule == "process_crash"
    assert "nonfinite_loss, from step 101" in found.message


def test_a_model_that_stands_still_comes_before_a_remark_on_time() -> None:
    columns = phases({"eval": 0.12}, steps=900) | {"loss": [2.30259] * 900}
    assert verdict_of(columns).rule == "frozen_training"
    waiting = verdict_of(phases({"data": 0.5}, steps=900) | {"loss": [2.30259] * 900})
    assert waiting.rule == "data_bound"
    assert waiting.message.endswith("The loss has been 2.30259 for 900 steps.")


def test_few_long_steps_are_enough_to_judge_the_time() -> None:
    assert verdict_of(phases({"data": 0.25}, steps=18, step_s=60.0), step_s=60.0).rule == "data_bound"


def test_little_of_everything_may_be_more_than_half_of_the_step() -> None:
    found = verdict_of(phases({"comm": 0.25, "other": 0.24, "data": 0.08}))
    assert found.rule == "comm_bound"


@pytest.mark.parametrize(
    ("phase", "said"), [("rollout", "Rollouts took 60 %"), ("h2d", "Copies to the device took 60 %")]
)
def test_what_is_not_compute_is_no_training(phase: str, said: str) -> None:
    found = verdict_of(phases({phase: 0.6}))
    assert said in found.message
    assert found.evidence["wall_time_pct"]["training"] == pytest.approx(40.0)


def test_a_phase_that_the_script_times_itself_is_not_told_to_be_timed() -> None:
    found = verdict_of(phases({"plots": 0.2}))
    assert "run.phase" not in found.fix
    assert "do it more rarely" in found.fix


def test_one_evaluation_is_no_habit() -> None:
    _, judge = judge_series(phases({}, steps=100), step_s=1.0)
    judge.take(frame({"phase/eval_s": [100.0]}, [100], ident=judge.upto + 1))
    found = judge.verdict()
    assert (found.rule, found.gain_pct) == ("eval_bound", None)
    assert "100 s at once, beside 100 steps" in found.message


def test_evaluations_and_saves_are_told_together_where_neither_is_much() -> None:
    found = verdict_of(phases({"eval": 0.05, "checkpoint": 0.06}))
    assert found.message.startswith("Saves 6 % and evaluation 5 % of the time of the 200 steps")
    assert found.evidence["proof"] == "the share of saves in the wall time goes down"


def test_a_run_with_communication_says_how_well_it_scales() -> None:
    evidence = verdict_of(phases({"comm": 0.2})).evidence
    assert evidence["comm_to_compute"] == pytest.approx(0.25)
    assert evidence["scaling_efficiency_pct"] == pytest.approx(80.0)
    assert "scaling_efficiency_pct" not in verdict_of(phases({})).evidence


def found(rule: str, severity: str, **more: object) -> Finding:
    return Finding(rule=rule, severity=severity, message=f"{rule}.", title=rule, fix=f"Mend {rule}.", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("findings", "first"),
    [
        ([("comm_bound", "warning"), ("throughput_regression", "critical")], "throughput_regression"),
        ([("data_bound", "warning"), ("loss_spike", "warning")], "loss_spike"),
        ([("straggler", "warning"), ("comm_bound", "warning")], "straggler"),
        ([("loss_plateau", "info"), ("data_bound", "warning")], "data_bound"),
    ],
)
def test_the_headline_is_what_is_worst_and_then_what_spoils_the_result(
    findings: list[tuple[str, str]], first: str
) -> None:
    rules = {rule.id: rule for rule in all_rules()}
    ordered = worst_first([found(*one) for one in findings], rules)
    _, judge = judge_series(_stepping(0.0))
    assert verdict(judge.window, ordered).rule == first


def test_a_run_that_waits_for_cores_is_told_that_and_not_to_compile_its_model() -> None:
    _, judge = judge_series(_stepping(0.0))
    waits = found("cpu_oversubscribed", "info", evidence={"pressure_pct": 95.0})
    said = verdict(judge.window, [waits])
    assert (said.rule, said.fix) == ("cpu_oversubscribed", waits.fix)


def test_a_healthy_run_gets_the_fix_of_what_slows_it_a_little() -> None:
    _, judge = judge_series(_stepping(0.0))
    said = verdict(judge.window, [found("allocator_churn", "info")])
    assert (said.rule, said.fix) == ("healthy", "Mend allocator_churn.")
    assert not said.message.startswith("Nothing")


def test_a_pause_after_an_attempt_that_finished_is_no_standstill() -> None:
    judge = make_evaluator()
    columns = _stepping(0.0)
    judge.take(frame(columns, range(1, 41), ident=1, events=[state("running")]))
    judge.take(frame({}, [], ident=2, events=[state("finished")]))
    later = [state("running", start_step=41)]
    judge.take(frame(columns, range(41, 81), ident=3, attempt=2, late_s=3600.0, events=later))
    assert judge.verdict().rule == "healthy"


@pytest.mark.parametrize("more", [0, 10])
def test_the_proof_of_a_fix_is_no_step_that_the_run_has_passed(more: int) -> None:
    _, judge = judge_series({"loss": [2.0] * 49 + [math.nan] * (1 + more)})
    found = judge.verdict()
    assert (found.rule, found.since_step) == ("nonfinite_loss", 50)
    assert ("50" in str(found.evidence.get("proof"))) is (more == 0)
