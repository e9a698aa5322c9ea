"""nonfinite_loss and nonfinite_gradient: told at once, dated to where it began, and excused where a scaler skipped."""

from __future__ import annotations

import math
from typing import Any

import pytest
from judging import fired, frame, make_evaluator, state
from step_job import StepJob

from perfagent_server.rules.loss.nonfinite_loss import NonfiniteLoss
from perfagent_server.rules.model.nonfinite_gradient import NonfiniteGradient

NAN, INF = math.nan, math.inf
RULES = (NonfiniteLoss(), NonfiniteGradient())


def train(*, rows: int = 50, restarts: int = 7, **series: list[float]) -> StepJob:
    columns = {name.replace("_", "/", 1): values for name, values in series.items()}
    return StepJob(*RULES, restarts=restarts).go_on(columns, rows=rows)


def told(job: StepJob) -> list[tuple[str, int]]:
    return [(change.finding.rule, change.step) for change in job.fired]


@pytest.mark.parametrize(
    ("before", "over"),
    [
        ([0.16, 827.3, 3.98e13], 3), ([2.3, 2.3, 2.4, 9.0, 4e4], 4), ([0.11, 0.3, 0.16, 827.3, 3.98e13], 3),
        ([2.3, 5e6, 2.4], None), ([0.0, 0.0, 2.4], None), ([2.3, 2.2, 9.0], None), ([-2.3, -4e4], None), ([], None),
    ],
)  # fmt: skip
def test_a_loss_that_ran_away_is_told_from_one_that_broke(before: list[float], over: int | None) -> None:
    found = train(loss=[*before, INF, NAN]).found
    assert found.cause == ("the loss grew before" if over else "")
    assert (found.evidence["grown_values"], found.evidence["last_losses"]) == (over, before)


@pytest.mark.parametrize(
    ("norms", "grown"),
    [
        ([0.4, 0.5, 0.3, 0.4, 40.0, 9e3, 1e12], (5, 0.4, 1e12)), ([0.4, 0.5, 0.3, 0.6, 40.0, 90.0, 0.5], None),
        ([0.0, 0.0, 0.0, 5.0], None), ([0.4, 0.5, 4.0], None), ([1e9, 0.4, 0.5, 5e3], None), ([3.0], None),
    ],
)  # fmt: skip
def test_gradients_that_exploded_are_told_with_the_nan(
    norms: list[float], grown: tuple[int, float, float] | None
) -> None:
    for loss in (NAN, 2.0):
        found = train(loss=[2.0] * len(norms) + [loss], grad_norm=[*norms, INF]).found
        assert found.cause == ("the gradient grew before" if grown else "")
        figures = tuple(found.evidence.get(key) for key in ("norm_step", "norm_from", "norm_to"))
        assert figures == (grown or (None, None, None))


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_one_bad_value_is_resolved_after_fifty_finite_steps(bad: float) -> None:
    job = train(loss=[1.0] * 5 + [bad] + [1.0] * 100)
    assert [(change.kind, change.step) for change in job.changes] == [("fire", 6), ("resolve", 56)]


def test_a_nan_loss_is_critical_with_what_was_around_it() -> None:
    """One frame brings the NaN and what came after it; the other rank is still behind."""
    evaluator = make_evaluator(rules=RULES)
    evaluator.take(frame({}, [], events=[state("starting", world_size=2)]))
    columns = {"loss": [3.0, 2.0, NAN, 9.0], "lr": [0.1, 0.2, 0.3, 0.4], "grad/norm": [1.0, 2.0, 3.0, 4.0]}
    [alert] = fired(evaluator.take(frame(columns, [1, 2, 3, 4], ident=2)))
    found, evidence = alert.finding, alert.finding.evidence
    assert (found.rule, found.severity, found.since_step, found.ranks) == ("nonfinite_loss", "critical", 3, [0])
    assert (evidence["last_losses"], evidence["lr"], evidence["grad_norms"]) == ([3.0, 2.0], 0.3, [1.0, 2.0, 3.0])
    [more] = evaluator.take(frame({"loss": [3.0, 2.0, NAN]}, [1, 2, 3], rank=1, ident=3))
    assert (more.kind, more.finding.ranks) == ("update", [0, 1])


def test_overflow_that_the_scaler_skipped_is_no_fault() -> None:
    bad = [step in (0, 1, 2, 150) for step in range(300)]
    skipped = [float(sum(bad[: step + 1])) for step in range(300)]
    scale = [65536.0 / 2**count for count in skipped]
    norms = [INF if one else 1.0 for one in bad]
    series = {"loss": [2.0] * 300, "grad_norm": norms, "grad_nonfinite": [float(one) for one in bad]}
    for words in ({"amp_scale": scale, "amp_skipped": skipped}, {"amp_scale": [65536.0, *scale[:-1]]}):
        for rows in (1, 50):
            assert train(**series, **words, rows=rows).changes == [], (rows, list(words))


HALVED = [1024.0] * 10 + [1024.0 / 2**step for step in range(1, 21)]
FAULTS: dict[str, tuple[dict[str, Any], list[tuple[str, int]]]] = {
    "gradients that were stepped on": (
        {"loss": [2.0] * 25, "grad_norm": [1.0] * 20 + [NAN] * 5, "amp_scale": [1024.0] * 25, "amp_skipped": [0.0] * 25},
        [("nonfinite_gradient", 21)],
    ),
    "a loss that stays so although steps are skipped": (
        {"loss": [2.0] * 10 + [NAN] * 20, "amp_scale": HALVED, "amp_skipped": [0.0] * 10 + [float(at) for at in range(1, 21)]},
        [("nonfinite_loss", 13)],
    ),
    "every step is skipped": (
        {"loss": [2.0] * 60, "grad_norm": [INF] * 60, "amp_scale": [2.0**16 / 2**step for step in range(60)]},
        [("nonfinite_gradient", 1)],
    ),
    "two steps skipped, and more later that were not": (
        {"loss": [2.0] * 10 + [NAN] * 2 + [2.0] * 100 + [NAN] * 300, "amp_skipped": [0.0] * 10 + [1.0] + [2.0] * 401},
        [("nonfinite_loss", 113)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAULTS)
def test_what_no_skipped_step_excuses_is_told(kind: str) -> None:
    series, expected = FAULTS[kind]
    assert told(train(**series, rows=500)) == expected


@pytest.mark.parametrize("rows", [1, 500])
def test_a_loss_of_skipped_steps_is_dated_to_the_first(rows: int) -> None:
    series, _ = FAULTS["a loss that stays so although steps are skipped"]
    found = train(**series, rows=rows).found
    assert (found.cause, found.since_step, found.evidence["step"]) == ("steps skipped", 11, 11)


def spoilt(gradient_at: int, loss_at: int, *, rows: int = 1, restarts: int = 7, **more: list[float]) -> StepJob:
    """A gradient that is no number in one step, and a loss that is none from another on."""
    losses = [2.0] * (loss_at - 1) + [NAN] * 4
    norms = [NAN if step == gradient_at or step >= loss_at else 1.0 for step in range(1, len(losses) + 1)]
    return train(loss=losses, grad_norm=norms, rows=rows, restarts=restarts, **more)


@pytest.mark.parametrize(("rows", "restarts"), [(1, 0), (100, 0), (30, 1)])
def test_a_loss_after_a_bad_gradient_is_dated_to_it(rows: int, restarts: int) -> None:
    job = spoilt(30, 31, rows=rows, restarts=restarts)
    assert len({change.alert for change in job.changes}) == 1
    found = job.evaluator.verdict()
    assert (found.rule, found.since_step) == ("nonfinite_loss", 30)
    assert (found.evidence["step"], found.evidence["gradient_step"], found.evidence["began_step"]) == (31, 30, 30)


@pytest.mark.parametrize(
    ("gradient_at", "more"), [(20, {}), (30, {"amp_skipped": [0.0] * 29 + [1.0] * 5, "amp_scale": [1024.0] * 34})],
    ids=["finite losses between", "a skipped step"],
)  # fmt: skip
def test_a_gradient_that_did_no_harm_began_nothing(gradient_at: int, more: dict[str, list[float]]) -> None:
    found = spoilt(gradient_at, 31, **more).evaluator.verdict()
    assert (found.rule, found.since_step, found.evidence["began_step"]) == ("nonfinite_loss", 31, None)


@pytest.mark.parametrize("order", ["loss first", "gradient first"])
def test_nan_on_many_ranks_in_one_step_is_one_alert(order: str) -> None:
    evaluator = make_evaluator(rules=RULES)
    changes = evaluator.take(frame({}, [], events=[state("starting", world_size=8)]))
    whole = [({"loss": [2.0, NAN], "grad/norm": [1.0, NAN], "grad/nonfinite": [0.0, 3.0]}, [1, 2])]
    apart = [({"loss": [2.0], "grad/norm": [1.0]}, [1]), ({"grad/norm": [NAN]}, [2]), ({"loss": [NAN]}, [2])]
    for rank in range(8):
        for columns, steps in apart if order == "gradient first" and rank == 0 else whole:
            changes += evaluator.take(frame(columns, steps, rank=rank, ident=2 + rank))
    assert len(fired(changes)) == len({change.alert for change in changes}) == 1
    assert (changes[-1].finding.rule, changes[-1].finding.ranks) == ("nonfinite_loss", list(range(8)))


def test_a_new_attempt_closes_the_old_alerts_and_arms_the_rules() -> None:
    evaluator = make_evaluator(rules=RULES)
    changes = evaluator.take(frame({"loss": [1.0, NAN]}, [1, 2], ident=1))
    changes += evaluator.take(frame({"loss": [1.0, NAN]}, [1, 2], ident=2, attempt=2))
    assert [change.kind for change in changes] == ["fire", "resolve", "fire"]
    assert changes[0].alert == changes[1].alert != changes[2].alert
    assert evaluator.take(frame({"loss": [NAN]}, [3], ident=3, attempt=1)) == []


@pytest.mark.parametrize(("rows", "ranks"), [(50, 1), (2000, 2)])
def test_the_first_bad_step_is_named_however_many_follow(rows: int, ranks: int) -> None:
    losses = [2.0] * 209 + [NAN] * (max(400, rows) - 209)
    job = StepJob(*RULES, ranks=ranks, restarts=1).go_on({"loss": losses, "grad/norm": losses}, rows=rows)
    assert [change.finding.since_step for change in fired(job.changes, "nonfinite_loss")] == [210]
    assert job.changes[-1].finding.ranks == list(range(ranks))
    assert len(job.evaluator.window.nonfinite["loss"].steps) <= 512
