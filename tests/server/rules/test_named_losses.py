"""Losses under the names that scripts give them: a NaN in what is trained on is told once, a NaN by design never."""

from __future__ import annotations

import math

import pytest
from judging import fired, frame, judge_series, make_evaluator

from perfagent.wire import is_evaluation_loss, loss_kind
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.plan import Plan

BROKEN = [1.0] * 5 + [math.nan] * 100
NAMES = {
    "whole": """loss train/loss train_loss trainLoss trainloss loss/total total_loss lm_loss Loss losses/loss loss/train
        train_loss_epoch train/loss_step running_loss avg_loss""",
    "part": "train/ce_loss g_loss d_loss loss/kl policy_loss loss_mask z_loss alpha_loss gradient_penalty_loss loss_1 MSELoss",
    "": """val/loss val_loss valLoss valloss eval/loss eval_loss test_loss loss/val validation/loss dev-loss eval_train_loss
        loss_scale train/loss_scale best_loss best_val_loss min_loss loss_std loss_weight grad_norm/loss.weight update_ratio/loss
        nan_loss_count glossary lossless train/ppl lr grad/norm accuracy amp/scale logged/loss logged/train/loss""",
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_name_says_whether_it_is_a_loss_that_is_trained_on(kind: str) -> None:
    names = NAMES[kind].split()
    assert {name: loss_kind(name) for name in names} == dict.fromkeys(names, kind)


@pytest.mark.parametrize(
    "series",
    [
        *({"train/loss": [1.0] * 60, name: [math.nan] * 60} for name in ("val/loss", "eval_loss", "best_loss", "loss_scale")),
        {"policy_loss": [1.0 if step % 10 == 0 else math.nan for step in range(300)], "value_loss": [0.5] * 300},
        {"actor_loss": [math.nan] * 300, "critic_loss": [0.5] * 300},
        {"loss/kl": BROKEN, "train/loss": [1.0] * 105},
    ],
    ids=["validation", "evaluation", "best", "scale", "now and then", "not begun", "beside the whole, which would have it"],
)  # fmt: skip
def test_what_is_nan_by_design_is_silent(series: dict[str, list[float]]) -> None:
    assert judge_series(series)[0] == []


def test_a_part_of_a_loss_that_broke_is_told_where_no_whole_is() -> None:
    """The gradient of that step belongs to it."""
    changes, _ = judge_series({"g_loss": BROKEN, "d_loss": [0.5] * 105, "grad/norm": BROKEN}, rows=7)
    assert [change.finding.rule for change in fired(changes)] == ["nonfinite_gradient"]
    told = [change.finding for change in changes if change.kind == "update"][-1]
    assert (told.rule, told.since_step, told.evidence["series"]) == ("nonfinite_loss", 6, "g_loss")
    assert len({change.alert for change in changes}) == 1


def test_nan_in_all_losses_of_a_run_is_one_alert_about_the_loss() -> None:
    """Also where the script counts its steps from zero."""
    evaluator, changes = make_evaluator(), []
    for step in range(1, 12):
        value = 2.0 if step < 6 else math.nan
        measured = frame({name: [value] for name in ("loss", "loss/kl", "grad/norm")}, [step], ident=step)
        measured.groups.extend(frame({"train/loss": [value], "loss/total": [value]}, [step - 1]).groups)
        changes += evaluator.take(measured)
    [alert] = fired(changes)
    assert (alert.finding.evidence["series"], alert.finding.since_step) == ("loss", 6)


@pytest.mark.parametrize(("begin", "rows"), [(0, 1), (0, 7), (1, 7)])
def test_a_loss_of_the_script_in_a_skipped_step_is_excused(begin: int, rows: int) -> None:
    """Counted from 0 or from 1, in whatever pieces it comes: the word on the skipped step may follow one step later."""
    evaluator, changes = make_evaluator(), []
    for first in range(1, 61, rows):
        steps = range(first, min(first + rows, 61))
        columns = {"loss": [1.0] * len(steps), "amp/scale": [1024.0] * len(steps)}
        stored = frame(columns | {"amp/skipped": [float(step >= 31) for step in steps]}, steps, ident=first)
        logged = {"train/loss": [math.nan if step == 31 else 1.0 for step in steps]}
        stored.groups.extend(frame(logged, [at - 1 + begin for at in steps]).groups)
        changes += evaluator.take(stored)
    assert changes == []


def test_a_running_mean_that_stays_poisoned_is_told() -> None:
    columns = {"train/loss": [1.0] * 10 + [math.nan] * 30, "loss": [1.0] * 40, "amp/scale": [1024.0] * 40}
    changes, _ = judge_series(columns | {"amp/skipped": [0.0] * 10 + [1.0] * 30}, rows=1)
    [alert] = fired(changes)
    assert (alert.finding.evidence["series"], alert.step) == ("train/loss", 13)


@pytest.mark.parametrize("name", ["train/loss", "loss/total"])
def test_a_spike_in_the_scripts_own_loss_is_told(name: str) -> None:
    losses = [3.0 + 0.02 * math.sin(7.0 * step) for step in range(500)] + [9.0] * 40
    [alert] = fired(judge_series({name: losses, "loss/kl": losses})[0])
    assert (alert.finding.rule, alert.finding.evidence["series"]) == ("loss_spike", name)


def test_a_mirrored_loss_is_read_by_no_rule() -> None:
    """Neither a NaN in it nor a jump, beside a loss that is well."""
    values = [1.0 + 0.001 * (step % 7) for step in range(600)]
    copied = [*values[:300], *[9.0] * 290, *[math.nan] * 10]
    changes, evaluator = judge_series({"loss": values, "logged/loss": copied, "logged/grad/norm": copied})
    assert changes == []
    assert not {name for name in evaluator.window.by_step if name.startswith("logged/")}
    assert judge_series({"loss": copied[:595]})[0], "and these would be"


@pytest.mark.parametrize(
    ("name", "bad"), [("train/loss", math.nan), ("train_loss", math.inf), ("loss/total", math.nan)]
)
def test_a_nan_in_the_scripts_own_loss_is_told_with_its_name(name: str, bad: float) -> None:
    changes, _ = judge_series({name: [3.0, 2.5, bad, bad, bad]}, rows=2)
    [alert] = fired(changes)
    assert (alert.finding.rule, alert.finding.severity, alert.finding.since_step) == ("nonfinite_loss", "critical", 3)
    assert (alert.finding.evidence["series"], alert.finding.evidence["last_losses"]) == (name, [3.0, 2.5])


def test_a_name_says_whether_it_is_the_loss_of_an_evaluation() -> None:
    evaluations = ["val/loss", "val_loss", "eval/loss", "eval_loss", "test_loss", "validation/total_loss"]
    others = ["loss", "train/loss", "best_val_loss", "val/loss_kl_weight", "val/accuracy", "val_loss_min"]
    assert [name for name in evaluations + others if is_evaluation_loss(name)] == evaluations


def test_each_loss_is_judged_for_nan_at_once_and_nothing_else_is() -> None:
    plan = Plan(all_rules())
    assert [rule.id for rule in plan.rules_on("d_loss", "g_loss")] == ["nonfinite_loss"]
    assert plan.rules_on("reward", "g_loss") == ()
