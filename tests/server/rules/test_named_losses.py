"""Losses under the names that scripts give them: a NaN in what is trained on is told once, a NaN by design never."""

from __future__ import annotations

import math

import pytest
from judging import fired, frame, judge_series, make_evaluator, restored, state

from perfagent.wire import is_evaluation_loss, loss_kind
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.loss.loss_spike import LossSpike
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.window import Window

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


@pytest.mark.parametrize("name", ["train/loss", "train_loss", "loss/total"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nan_in_the_script_s_own_loss_is_told_at_once_with_its_name(name: str, bad: float) -> None:
    changes, _ = judge_series({name: [3.0, 2.5, bad, bad, bad]}, rows=2)
    [alert] = fired(changes)
    assert (alert.finding.rule, alert.finding.severity, alert.finding.since_step) == ("nonfinite_loss", "critical", 3)
    assert alert.finding.message.startswith(f"{name} became ")
    assert "the last finite value was 2.5" in alert.finding.message
    assert (alert.finding.evidence["series"], alert.finding.evidence["last_losses"]) == (name, [3.0, 2.5])


@pytest.mark.parametrize("name", ["val/loss", "val_loss", "eval/loss", "best_loss", "loss_scale", "accuracy"])
def test_what_is_nan_by_design_is_silent(name: str) -> None:
    changes, evaluator = judge_series({"train/loss": [1.0] * 60, name: [math.nan] * 60})
    assert changes == []
    assert evaluator.window.nonfinite["loss"].steps == []


def test_nan_in_all_losses_of_a_run_is_one_alert_about_the_loss() -> None:
    sick = [2.0] * 5 + [math.nan] * 10
    changes, _ = judge_series(
        {"train/loss": sick, "loss/total": sick, "loss": sick, "loss/kl": sick, "grad/norm": sick}, rows=3
    )
    [alert] = fired(changes)
    assert alert.finding.message.startswith("The loss became NaN in step 6")
    assert alert.finding.evidence["series"] == "loss"


def test_a_script_that_counts_its_steps_from_zero_is_still_one_alert_about_the_loss() -> None:
    evaluator = make_evaluator()
    changes = []
    for step in range(1, 12):
        value = 2.0 if step < 6 else math.nan
        measured = frame({"loss": [value], "grad/norm": [value]}, [step], ident=step)
        logged = frame({"train/loss": [value]}, [step - 1])
        measured.groups.extend(logged.groups)
        changes += evaluator.take(measured)
    [alert] = fired(changes)
    assert (alert.finding.evidence["series"], alert.finding.since_step) == ("loss", 6)


def test_a_mirrored_loss_is_read_by_no_rule() -> None:
    """Neither a NaN in it nor a jump, beside a loss that is well."""
    values = [1.0 + 0.001 * (step % 7) for step in range(600)]
    copied = [*values[:300], *[9.0] * 290, *[math.nan] * 10]
    changes, evaluator = judge_series({"loss": values, "logged/loss": copied, "logged/grad/norm": copied})
    assert changes == []
    assert not {name for name in evaluator.window.by_step if name.startswith("logged/")}
    assert judge_series({"loss": copied[:595]})[0], "and these would be"


def test_the_alert_is_over_when_its_own_series_is_finite_again() -> None:
    """Others that are finite beside it, also more often, do not say that it is over."""
    evaluator = make_evaluator()
    changes = []
    for step in range(1, 1001):
        ident = 2 * step
        changes += evaluator.take(frame({"total_loss": [1.0 + step % 7]}, [step], ident=ident))
        if step % 10 == 0:
            changes += evaluator.take(
                frame({"train/loss": [math.nan if step == 100 else 1.0]}, [step], ident=ident + 1)
            )
    about_nan = [change for change in changes if change.finding.rule == "nonfinite_loss"]
    assert [(change.kind, change.step) for change in about_nan] == [("fire", 100), ("resolve", 600)]


def test_a_part_of_a_loss_that_is_computed_now_and_then_is_silent() -> None:
    losses = [1.0 if step % 10 == 0 else math.nan for step in range(300)]
    changes, _ = judge_series({"policy_loss": losses, "value_loss": [0.5] * 300})
    assert changes == []


def test_a_part_of_a_loss_that_did_not_begin_yet_is_silent() -> None:
    changes, _ = judge_series({"actor_loss": [math.nan] * 300, "critic_loss": [0.5] * 300})
    assert changes == []


def test_a_part_of_a_loss_that_broke_is_told_when_there_is_no_whole_one() -> None:
    losses = [0.7] * 40 + [math.nan] * 200
    changes, _ = judge_series(
        {"g_loss": losses, "d_loss": [0.5] * 240, "grad/norm": [1.0] * 40 + [math.nan] * 200}, rows=7
    )
    [alert] = fired(changes)  # the gradient of that step belongs to it
    assert alert.finding.rule == "nonfinite_gradient"
    told = [change.finding for change in changes if change.kind == "update"]
    assert told[-1].message.startswith("g_loss became NaN in step 41")
    assert (told[-1].rule, told[-1].since_step) == ("nonfinite_loss", 41)
    assert {change.alert for change in changes} == {alert.alert}


def test_a_part_beside_a_whole_loss_says_nothing_because_its_nan_would_be_in_the_whole() -> None:
    changes, evaluator = judge_series({"loss/kl": [1.0] * 5 + [math.nan] * 100, "train/loss": [1.0] * 105})
    assert changes == []
    assert evaluator.window.nonfinite["loss"].steps == []


@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("rows", [1, 7])
def test_a_loss_of_the_script_in_a_step_that_the_scaler_skipped_is_excused(begin: int, rows: int) -> None:
    """Counted from 0 or from 1, in whatever pieces it comes: the word on the skipped step may follow one step later."""
    evaluator = make_evaluator()
    changes, skipped = [], 0.0
    for first in range(1, 61, rows):
        steps = range(first, min(first + rows, 61))
        bad = [step == 30 for step in steps]
        counts = [skipped := skipped + one for one in bad]
        stored = frame(
            {"loss": [1.0] * len(bad), "amp/scale": [1024.0] * len(bad), "amp/skipped": counts}, steps, ident=first
        )
        logged = {"train/loss": [math.nan if one else 1.0 for one in bad]}
        stored.groups.extend(frame(logged, [at - 1 + begin for at in steps]).groups)
        changes += evaluator.take(stored)
    assert changes == []


def test_a_running_mean_that_a_skipped_step_poisoned_is_told_when_it_stays_so() -> None:
    steps = 40
    sick = [1.0] * 10 + [math.nan] * 30
    changes, _ = judge_series(
        {
            "train/loss": sick,
            "loss": [1.0] * steps,
            "amp/scale": [1024.0] * steps,
            "amp/skipped": [0.0] * 10 + [1.0] * 30,
        },
        rows=1,
    )
    [alert] = fired(changes)
    assert (alert.finding.evidence["series"], alert.step) == ("train/loss", 13)


def test_the_judgment_goes_on_from_a_snapshot_at_any_frame() -> None:
    losses = [0.7] * 30 + [math.nan] * 25 + [0.6] * 80
    whole, _ = judge_series({"g_loss": losses, "d_loss": [1.0] * 135}, rows=5)
    pieces, evaluator = [], make_evaluator()
    for begin in range(0, 135, 5):
        evaluator = restored(evaluator)
        columns = {"g_loss": losses[begin : begin + 5], "d_loss": [1.0] * 5}
        pieces += evaluator.take(frame(columns, range(begin + 1, begin + 6), ident=evaluator.upto + 1))
    assert [(one.kind, one.alert, one.step, one.finding.message) for one in pieces] == [
        (one.kind, one.alert, one.step, one.finding.message) for one in whole
    ]
    assert [one.kind for one in whole] == ["fire", "resolve"]


def test_a_run_keeps_only_so_many_losses() -> None:
    changes, evaluator = judge_series({f"loss_{place}": [1.0] * 10 for place in range(1000)})
    assert changes == []
    assert len(evaluator.window.by_step) <= 32


def test_another_rank_s_nan_joins_the_alert() -> None:
    evaluator = make_evaluator()
    evaluator.take(frame({}, [], events=[state("starting", world_size=2)]))
    [alert] = fired(evaluator.take(frame({"train/loss": [1.0, math.nan]}, [1, 2], ident=2)))
    assert "on rank 0" in alert.finding.message
    [more] = evaluator.take(frame({"train/loss": [1.0, math.nan]}, [1, 2], rank=1, ident=3))
    assert (more.kind, more.finding.ranks) == ("update", [0, 1])


@pytest.mark.parametrize("name", ["loss", "train/loss", "train_loss"])
def test_a_spike_is_one_in_whatever_series_is_the_loss_of_the_run(name: str) -> None:
    window = Window("r", Plan(all_rules()))
    track = window.begin(name)
    losses = [3.0 + 0.02 * math.sin(7.0 * step) for step in range(500)] + [9.0] * 5
    track.take(0, range(1, 506), losses, [0.0] * 505, 0.0, 1)
    while window.advance(name):
        pass
    found = LossSpike().judge(window)
    assert found is not None
    assert found.message.startswith(f"{'The loss' if name == 'loss' else name} jumped to 9 at step 505")
    assert found.evidence["series"] == name


@pytest.mark.parametrize("name", ["train/loss", "train_loss", "loss/total"])
def test_a_spike_in_the_script_s_own_loss_is_told_as_one_in_loss_is(name: str) -> None:
    losses = [3.0 + 0.02 * math.sin(7.0 * step) for step in range(500)] + [9.0] * 40
    changes, _ = judge_series({name: losses, "loss/kl": losses})
    [alert] = fired(changes)
    assert alert.finding.rule == "loss_spike"
    assert alert.finding.message.startswith(f"{name} jumped to 9")


@pytest.mark.parametrize(
    "name", ["val/loss", "val_loss", "eval/loss", "eval_loss", "test_loss", "validation/total_loss"]
)
def test_a_name_says_whether_it_is_the_loss_of_an_evaluation(name: str) -> None:
    assert is_evaluation_loss(name)


@pytest.mark.parametrize(
    "name", ["loss", "train/loss", "best_val_loss", "val/loss_kl_weight", "val/accuracy", "val_loss_min"]
)
def test_other_names_are_not_taken_for_it(name: str) -> None:
    assert not is_evaluation_loss(name)
