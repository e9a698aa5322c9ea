"""data_bug, data_repeats and tokens_wasted, on what the agent says of batches every two seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from judging import START
from step_job import StepJob

from perfagent.wire import Event
from perfagent_server.rules.data.data_bug import DataBug
from perfagent_server.rules.data.data_repeats import DataRepeats
from perfagent_server.rules.loss.nonfinite_loss import NonfiniteLoss
from perfagent_server.rules.rule import Rule
from perfagent_server.rules.speed.tokens_wasted import TokensWasted

EVERY = 20  # steps between two readings


def train(
    rule: Rule, readings: Sequence[dict[str, float]], *, ranks: int = 1, waits_s: Sequence[float] = ()
) -> StepJob:
    """Steps of 0.1 s, and one of these readings with each 20th. waits_s: for a batch, of each step."""
    steps = EVERY * len(readings)
    columns = {"step_time_s": [0.1] * steps} | ({"phase/data_s": waits_s} if waits_s else {})
    measured = {EVERY * number: values for number, values in enumerate(readings, 1) if values}
    loss = Event(kind="loss", time=START, step=1, data={"kind": "cross_entropy", "classes": 9, "mean": True})
    return StepJob(rule, ranks=ranks, restarts=3).go_on(columns, rows=EVERY, measured=measured, events={1: [loss]})


def padded(*pct: float) -> list[dict[str, float]]:
    return [{"batch/padding_pct": one} for one in pct]


@pytest.mark.parametrize(("ranks", "step"), [(1, 100), (4, 160)])  # rank 0 is heard first
def test_padding_of_a_third_is_a_remark(ranks: int, step: int) -> None:
    job = train(TokensWasted(), padded(*[30.0] * 20), ranks=ranks)
    assert (job.found.rule, job.found.severity, job.alert.step) == ("tokens_wasted", "info", step)
    assert job.found.gain_pct == pytest.approx(30)
    assert train(TokensWasted(), padded(*[52.0, 53.0, 54.0] * 5)).found.evidence["highest_pct"] == 54


def repeated(*counts: float, distinct: float = 100.0) -> list[dict[str, float]]:
    return [{"batch/repeats": count, **({"batch/distinct": distinct} if count else {})} for count in counts]


def test_the_third_repeat_is_told_with_the_number_of_batches() -> None:
    job = train(DataRepeats(), repeated(0, 0, 1, 2, 2, 2, 2, 3, *[12] * 5))
    assert (job.found.severity, job.found.cause, job.alert.step, job.found.since_step) == ("warning", "", 160, 60)
    assert (job.found.evidence["repeats"], job.found.evidence["distinct"]) == (3, 100)


@pytest.mark.parametrize(
    ("readings", "waits_s", "severity", "cause", "fix"),
    [
        (repeated(45, 90, distinct=55.0), (), "warning", "several times in a row", "get_worker_info"),
        (repeated(44, distinct=56.0), (), "warning", "", "sampler"),
        (repeated(19, 39, 59, distinct=1.0), (), "info", "one batch", "overfit"),
        (repeated(19, 39, 59, distinct=1.0), [0.002] * 60, "warning", "one batch", "seeded for each batch"),
        (repeated(*[0] * 3, 19, 39, distinct=1.0), [0.002] * 59 + [0.0] * 41, "info", "one batch", "overfit"),
    ],
    ids=["each worker reads all", "fewer", "one batch", "of a loader", "of a loader once"],
)
def test_repeats_are_told_with_their_cause(
    readings: list[dict[str, float]], waits_s: list[float], severity: str, cause: str, fix: str
) -> None:
    found = train(DataRepeats(), readings, waits_s=waits_s).found
    assert (found.severity, found.cause) == (severity, cause)
    assert fix in found.fix


@pytest.mark.parametrize(
    ("pct", "kinds"),
    [
        ([33.0] * 20 + [27.0] * 60, ["fire"]),
        ([33.0] * 20 + [20.0] * 60, ["fire", "resolve"]),
        ([29.9] * 30, []),
        ([80.0] * 4, []),
    ],
    ids=["around the threshold", "less from then on", "little", "few steps"],
)
def test_padding_is_one_remark_until_it_is_little(pct: list[float], kinds: list[str]) -> None:
    assert train(TokensWasted(), padded(*pct)).kinds == kinds


@pytest.mark.parametrize(
    "counts", [[0, 0, 1, 1, *[2] * 40], [number // 30 for number in range(120)], [2, 2, 0, 1, 2, 2]],
    ids=["two", "old ones", "a process that counts anew"],
)  # fmt: skip
def test_few_repeats_are_nothing_and_old_ones_are_forgotten(counts: list[float]) -> None:
    assert train(DataRepeats(), repeated(*counts)).changes == []


def test_repeats_are_over_after_500_steps_without_one() -> None:
    job = train(DataRepeats(), repeated(0, 5, 10, *[10] * 60))
    assert job.kinds == ["fire", "resolve"]
    assert job.changes[-1].step == 600, "judged every five seconds: 560 is not more than 500 after 60"


@pytest.mark.parametrize(
    ("name", "lowest", "cause"),
    [
        ("ignored_pct", 99.9, "no label counts"),
        ("constant_pct", 95.0, "all rows the same"),
        ("one_class_pct", 95.0, "one class a batch"),
    ],
)
def test_a_defect_in_two_readings_in_a_row_is_named(name: str, lowest: float, cause: str) -> None:
    """What some batches have is none: of a fine-tuning on answers, most labels are left out."""
    job = train(DataBug(), [{f"batch/{name}": lowest}] * 6)
    assert (job.found.severity, job.found.cause, job.alert.step) == ("warning", cause, 60)
    assert job.found.evidence[name] == pytest.approx(lowest)
    assert train(DataBug(), [{f"batch/{name}": lowest - 0.1}] * 40).changes == []
    assert train(DataBug(), [{f"batch/{name}": 100.0 if number == 5 else 60.0} for number in range(20)]).changes == []
    mended = [{f"batch/{name}": 100.0 if number < 10 else 0.0} for number in range(30)]
    assert train(DataBug(), mended).kinds == ["fire", "resolve"]


def test_whole_numbers_are_no_labels_if_no_loss_takes_classes() -> None:
    steps = 6 * EVERY
    same = {EVERY * number: {"batch/one_class_pct": 100.0} for number in range(1, 7)}
    assert StepJob(DataBug()).go_on({"step_time_s": [0.1] * steps}, rows=EVERY, measured=same).changes == []


@pytest.mark.parametrize(("begins", "told"), [(100, ["nonfinite_loss"]), (0, ["data_bug", "nonfinite_loss"])])
def test_what_comes_of_weights_that_are_nan_is_no_news(begins: int, told: list[str]) -> None:
    """begins: when all rows became the same; the loss is NaN from step 81 on."""
    steps = 300
    losses = [1.0] * 80 + [math.nan] * (steps - 80)
    same = {EVERY * number: {"batch/constant_pct": 100.0} for number in range(begins // EVERY + 1, steps // EVERY)}
    job = StepJob(DataBug(), NonfiniteLoss())
    job.go_on({"step_time_s": [0.1] * steps, "loss": losses}, rows=EVERY, measured=same)
    assert [one.finding.rule for one in job.fired] == told


@pytest.mark.parametrize(
    ("mean", "spread", "is_far"),
    [
        (117.0, 66.0, True), (10.0, 8.0, True), (-3.0, 1.0, True), (9.9, 8.0, False), (-2.9, 1.0, False), (0.47, 0.25, False),
        (0.0, 1.0, False), (3.0, 0.0, False),
    ],
    ids=["0 to 255", "ten units", "three spreads", "less", "fewer", "by 255", "normalized", "constant"],
)  # fmt: skip
def test_inputs_far_from_zero_are_a_remark_after_500_steps(mean: float, spread: float, is_far: bool) -> None:
    job = train(DataBug(), [{"batch/input_mean": mean, "batch/input_std": spread}] * 60)
    told = [(change.finding.severity, change.finding.cause, change.step) for change in job.fired]
    assert told == ([("info", "not normalized", 500)] if is_far else [])
