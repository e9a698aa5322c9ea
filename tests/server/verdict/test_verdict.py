"""The verdict of a run in which no alert is open: its loss is no number, its step is mostly unaccounted for, or it is
healthy."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from judging import fired, frame, judge_series, make_evaluator, state

from perfagent.wire import Event, Finding
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.verdict.verdict import Happened, verdict, worst_first


def verdict_of(columns: dict[str, list[float]], *, step_s: float = 1.0, end: str = "") -> Finding:
    _, judge = judge_series(columns, step_s=step_s, rows=10)
    if end:
        tell(judge, state(end, step=len(columns["loss"]), reason=end))
    return judge.verdict()


def tell(judge: Evaluator, event: Event) -> None:
    judge.take(frame({}, [], ident=judge.upto + 1, events=[event]))


def phases(share: dict[str, float], *, steps: int = 200, step_s: float = 1.0) -> dict[str, list[float]]:
    """Steps of which each phase takes its share, and the forward pass the rest."""
    columns = {f"phase/{phase}_s": [part * step_s] * steps for phase, part in share.items()}
    columns["phase/forward_s"] = [step_s * (1 - sum(share.values()))] * steps
    return {"loss": [3.0 - 0.005 * step for step in range(steps)], "step_time_s": [step_s] * steps} | columns


@pytest.mark.parametrize("name", ["loss", "train/loss"])
@pytest.mark.parametrize(("bad", "count"), [(math.nan, 1), (math.nan, 10), (math.inf, 1)])
def test_nan_with_a_closed_alert_makes_no_run_healthy(name: str, count: int, bad: float) -> None:
    changes, judge = judge_series({name: [2.0] * 50 + [bad] * count})
    (alert,) = fired(changes)
    assert judge.resolve(alert.alert, judge.window.now, "by hand")
    found = judge.verdict()
    assert (found.rule, found.severity, found.since_step) == ("nonfinite_loss", "critical", 51)
    assert (found.cause, found.evidence["series"]) == ("no alert", name)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (0, "unknown: Nothing to judge yet"), (1, "unknown: Too few steps to judge, nothing wrong so far"),
        (9, "unknown: Too few steps"), (10, "healthy: Nothing holds this run back"),
    ],
)  # fmt: skip
def test_few_steps_are_no_proof_of_health(steps: int, said: str) -> None:
    judge = judge_series({"loss": [3.0] * steps})[1] if steps else make_evaluator()
    assert str(judge.verdict()).startswith(said)


def test_a_run_whose_newest_step_the_scaler_skipped_is_healthy() -> None:
    series = {"loss": [3.0] * 49 + [math.nan], "amp/scale": [1024.0] * 49 + [512.0], "amp/skipped": [0.0] * 49 + [1.0]}
    changes, judge = judge_series(series)
    assert changes == []
    assert judge.verdict().message == "Nothing holds this run back: step 50, loss 3 (from 3)."


@pytest.mark.parametrize(
    ("step_s", "after_s", "stands"), [(0.1, 59, False), (0.1, 93, True), (20, 93, False), (20, 101, True)]
)
def test_a_run_that_is_heard_and_ends_no_step_is_told_to_stand(step_s: float, after_s: float, stands: bool) -> None:
    _, judge = judge_series(phases({}, steps=40, step_s=step_s) | {"loss": [3.0] * 40}, step_s=step_s)
    alive = judge.window.now + after_s
    judge.take(frame({"host/load1": [0.0]}, [40], ident=judge.upto + 1, received=alive))
    found = judge.verdict()
    assert (found.rule, found.severity) == ("hang" if stands else "healthy", "info")
    assert found.evidence.get("standing_s") == (pytest.approx(after_s, abs=1) if stands else None)
    assert found.message.startswith("No step has ended for" if stands else "Nothing holds this run back")
    assert ("perfagent stacks RUN" in found.fix) == stands
    steps = {"loss": [3.0], "step_time_s": [alive - judge.window.now + step_s]}
    judge.take(frame(steps, [41], ident=judge.upto + 1, received=alive + 1))
    assert judge.verdict().message.startswith("Nothing holds this run back: step 41")
    judge.take(frame({}, [], ident=judge.upto + 1, received=alive + 900, events=[state("finished", step=41)]))
    assert judge.verdict().message.startswith("Nothing held this run back")


@pytest.mark.parametrize("end", ["", "finished"])
@pytest.mark.parametrize(
    ("share", "rule", "pct"),
    [
        ({"data": 0.34}, "data_bound", 34), ({"eval": 0.34}, "eval_bound", 34), ({"checkpoint": 0.34}, "checkpoint_bound", 34),
        ({"other": 0.4}, "unmeasured_time", 40), ({"comm": 0.52}, "comm_bound", 52), ({"h2d": 0.4}, "h2d_bound", 40),
        ({"plots": 0.34}, "unmeasured_time", 34), ({"data": 0.15}, "healthy", 0), ({"eval": 0.3}, "healthy", 0),
        ({"other": 0.25}, "healthy", 0), ({"comm": 0.45}, "healthy", 0), ({"plots": 0.05}, "healthy", 0),
    ],
)  # fmt: skip
def test_much_time_beside_training_is_told_and_little_is_healthy(
    share: dict[str, float], rule: str, pct: int, end: str
) -> None:
    found = verdict_of(phases(share), end=end)
    assert found.rule == rule
    assert rule == "healthy" or (f"{pct} %" in found.message and found.fix)


def test_the_wall_time_of_a_verdict_adds_up_to_all_of_it() -> None:
    found = verdict_of(phases({"data": 0.05, "eval": 0.2, "checkpoint": 0.15, "other": 0.1, "comm": 0.1}))
    assert found.rule == "eval_bound", "together they are more than a third, and evaluations are most of it"
    shares = found.evidence["wall_time_pct"]
    assert sum(shares.values()) == pytest.approx(100.0, abs=0.5)
    assert [shares["training"], shares["evaluation"]] == pytest.approx([40.0, 20.0], abs=0.2)
    both = verdict_of(phases({"eval": 0.16, "checkpoint": 0.18}))
    assert both.message.startswith("Saving took 18 % of the time of 200 steps, all pauses 34 %"), "neither is much"
    assert verdict_of(phases({"comm": 0.25, "other": 0.24, "data": 0.08})).rule == "comm_bound", "half of the step"


def test_a_pause_between_two_attempts_is_told_as_such() -> None:
    _, judge = judge_series(phases({}, steps=100), step_s=1.0)
    again = judge.window.now + 90.0
    judge.take(frame({}, [], attempt=2, ident=judge.upto + 1, received=again, events=[state("starting")]))
    columns = {name: values[:1] for name, values in phases({}).items()}
    for step in range(101, 141):
        at = again + step - 100
        judge.take(frame(columns, [step], attempt=2, ident=judge.upto + 1, received=at, step_s=1.0, late_s=90.0))
    found = judge.verdict()
    assert (found.rule, found.severity) == ("process_crash", "info")
    assert (found.evidence["stopped_s"], found.evidence["wall_s"]) == pytest.approx((90.0, 230.0), abs=1)


def test_a_pause_after_an_attempt_that_finished_is_no_standstill() -> None:
    judge = make_evaluator()
    columns = phases({}, steps=40, step_s=0.1)
    judge.take(frame(columns, range(1, 41), ident=1, events=[state("running")]))
    tell(judge, state("finished"))
    later = [state("running", start_step=41)]
    judge.take(frame(columns, range(41, 81), ident=3, attempt=2, late_s=3600.0, events=later))
    assert judge.verdict().rule == "healthy"


def test_a_loop_that_waits_for_busy_gpus_or_is_a_toy_is_healthy() -> None:
    busy = phases({"other": 0.95}, step_s=0.1) | {"gpu/utilization_pct": [99.0] * 200}
    assert verdict_of(busy, step_s=0.1).rule == "healthy"
    assert verdict_of(phases({"other": 0.9}, step_s=0.0009), step_s=0.0009).rule == "healthy"


def test_an_ended_run_says_what_happened_in_it_and_healed() -> None:
    losses = [2.0 + 0.01 * ((7 * step) % 5) + 2.0 * (400 <= step < 430) for step in range(600)]
    changes, judge = judge_series({"loss": losses}, rows=10)
    [spike] = fired(changes, "loss_spike")
    assert "Also: " not in judge.verdict().message
    tell(judge, state("finished", step=600))
    said = f"Also: {spike.finding.title} (loss_spike, from step {spike.finding.since_step}"
    assert said in judge.verdict().message


def test_an_ended_run_says_how_it_ended() -> None:
    nan = {"loss": [2.0] * 50 + [math.nan] * 5}
    assert "The run finished after step 55." in verdict_of(nan, end="finished").message
    found = verdict_of(phases({"data": 0.5}), end="finished")
    assert (found.rule, "The run finished after step 200." in found.message) == ("data_bound", True)


def test_what_healed_before_the_end_is_told_once() -> None:
    """A rule that held most of the time is a finding of an ended run, too."""
    _, judge = judge_series({"loss": [2.0] * 100})
    tell(judge, state("finished", step=100))
    worst = found("nonfinite_loss", "critical", since_step=100)
    slow = found("throughput_regression", "warning", since_step=90)
    told = verdict(judge.window, [worst, slow], happened=[Happened(slow, 99)]).message
    assert told.count("(throughput_regression") == 1
    assert "from step 90; over by step 99" in told


def test_open_findings_of_a_killed_run_are_told_beside_its_end() -> None:
    said = verdict_of({"loss": [2.0] * 100 + [math.nan] * 100}, end="killed")
    assert said.rule == "process_crash"
    assert "nonfinite_loss, from step 101" in said.message


@pytest.mark.parametrize(("padding_pct", "rule"), [(89.0, "tokens_wasted"), (31.0, "healthy")])
def test_padding_that_costs_over_a_third_of_the_step_is_told(padding_pct: float, rule: str) -> None:
    said = verdict_of(phases({}, step_s=0.1) | {"batch/padding_pct": [padding_pct] * 200}, step_s=0.1)
    assert (said.rule, said.severity, f"{padding_pct:.0f} %" in said.message) == (rule, "info", True)


@pytest.mark.parametrize(("end", "rule", "cause"), [(4.0, "loss_divergence", "above its start"), (1.5, "healthy", "")])
def test_run_whose_loss_ends_above_its_beginning_is_not_healthy(end: float, rule: str, cause: str) -> None:
    """Too short to be sure that it diverged."""
    said = verdict_of({"loss": [2.3 * 0.93**step for step in range(40)] + [0.13] * 100 + [end] * 9})
    assert (said.rule, said.severity, said.cause) == (rule, "info", cause)
    assert said.evidence.get("loss", end) == end


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
    said = verdict_of({"loss": losses})
    assert said.rule == "loss_divergence"
    assert "heals by itself" not in said.fix


@pytest.mark.parametrize("seed", range(2))
def test_losses_of_gans_and_policies_may_rise(seed: int) -> None:
    draw = random.Random(seed)
    gan = [(0.7 + 0.5 * min(1.0, step / 100)) * math.exp(0.15 * draw.gauss(0.0, 1.0)) for step in range(600)]
    policy = [draw.gauss(0.0, 0.1) for _ in range(600)]
    assert verdict_of({"loss": gan}).rule == verdict_of({"loss": policy}).rule == "healthy"


def test_a_model_that_stands_still_comes_before_a_remark_on_time() -> None:
    assert verdict_of(phases({"eval": 0.12}, steps=900) | {"loss": [2.30259] * 900}).rule == "frozen_training"
    waiting = verdict_of(phases({"data": 0.5}, steps=900) | {"loss": [2.30259] * 900})
    assert waiting.rule == "data_bound"
    assert waiting.message.endswith("The loss has been 2.30259 for 900 steps.")


@pytest.mark.parametrize(
    ("phase", "title"),
    [("rollout", "Rollouts took 60 % of the run"), ("h2d", "Copies to the device took 60 % of the run")],
)
def test_what_is_not_compute_is_no_training(phase: str, title: str) -> None:
    found = verdict_of(phases({phase: 0.6}))
    assert found.title == title
    assert found.evidence["wall_time_pct"]["training"] == pytest.approx(40.0)


def test_one_evaluation_is_no_habit() -> None:
    _, judge = judge_series(phases({}, steps=100), step_s=1.0)
    judge.take(frame({"phase/eval_s": [100.0]}, [100], ident=judge.upto + 1))
    said = judge.verdict()
    assert (said.rule, said.gain_pct) == ("eval_bound", None)
    assert (said.evidence["once_s"], said.evidence["steps"], said.evidence["each_step_s"]) == (100.0, 100, None)
    assert said.cost == "1.7 min at once"


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
        ([("data_bound", "critical"), ("loss_spike", "warning")], "loss_spike"),
        ([("straggler", "warning"), ("comm_bound", "warning")], "straggler"),
        ([("loss_plateau", "info"), ("data_bound", "warning")], "data_bound"),
        ([("cpu_oversubscribed", "info")], "cpu_oversubscribed"),
        ([("allocator_churn", "info")], "healthy"),  # with the fix of what slows it a little
    ],
)
def test_headline_is_what_spoils_the_result_then_the_worst(findings: list[tuple[str, str]], first: str) -> None:
    pressure = {"cpu_oversubscribed": {"pressure_pct": 95.0}}
    told = [found(rule, severity, evidence=pressure.get(rule, {})) for rule, severity in findings]
    ordered = worst_first(told, {rule.id: rule for rule in all_rules()})
    _, judge = judge_series(phases({}, steps=40, step_s=0.1), step_s=0.1)
    said = verdict(judge.window, ordered)
    assert (said.rule, said.fix) == (first, ordered[0].fix)
    assert not said.message.startswith("Nothing")


def test_gradients_never_cleared_lead_what_follows_from_them() -> None:
    rules = {rule.id: rule for rule in all_rules()}
    others = [found(rule, "critical") for rule in ("process_crash", "nonfinite_loss", "loss_divergence")]
    uncleared = found("wrong_optimizer", "warning", cause="never cleared")
    ordered = worst_first([*others, uncleared], rules)
    assert [one.rule for one in ordered] == ["process_crash", "wrong_optimizer", "nonfinite_loss", "loss_divergence"]
    assert worst_first([*others, found("wrong_optimizer", "warning")], rules)[-1].rule == "wrong_optimizer"


@pytest.mark.parametrize("more", [0, 10])
def test_the_proof_of_a_fix_is_no_step_that_the_run_has_passed(more: int) -> None:
    said = verdict_of({"loss": [2.0] * 49 + [math.nan] * (1 + more)})
    assert (said.rule, said.since_step) == ("nonfinite_loss", 50)
    assert ("50" in str(said.evidence.get("proof"))) is (more == 0)


def test_silent_run_without_an_agent_names_its_worst_open_alert() -> None:
    judge = judge_series({"loss": [3.0] * 50})[1]
    worst = Finding(rule="user_alert", severity="critical", message="look", title="BLEU fell")
    own = [worst, replace(worst, severity="warning", title="slow disk")]
    silent = verdict(judge.window, own, lost=True)
    assert (silent.rule, silent.cause, silent.severity, silent.since_step) == ("lost_contact", "no agent", "info", 50)
    assert silent.title == "The run went silent; its own alert is open: BLEU fell (critical); and 1 more"
    assert silent.evidence["open_alerts"][1] == {"kind": "alert", "severity": "warning", "title": "slow disk"}
    assert verdict(judge.window, [], lost=True).title == "The run went silent"
