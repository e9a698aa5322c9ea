"""data_bug, data_repeats and tokens_wasted, on what the agent says of batches every two seconds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from judging import fired, frame, make_evaluator, restored

from perfagent_server.alerts.state_machine import Change
from perfagent_server.rules.data.data_bug import DataBug
from perfagent_server.rules.data.data_repeats import DataRepeats
from perfagent_server.rules.rule import Rule
from perfagent_server.rules.speed.tokens_wasted import TokensWasted

STEP_S = 0.1
EVERY = 20  # steps between two readings


def train(
    rule: Rule, readings: Sequence[dict[str, float]], *, ranks: int = 1, every: int = EVERY, waits_s: float = 0.0
) -> list[Change]:
    """A run whose agent says one of these every two seconds; the server is started again in the middle."""
    evaluator = make_evaluator(rules=(rule,))
    changes: list[Change] = []
    for number, values in enumerate(readings):
        steps = range(1 + every * number, 1 + every * (number + 1))
        for rank in range(ranks):
            took = {"step_time_s": [STEP_S] * every}
            if waits_s:
                took["phase/data_s"] = [waits_s] * every
            changes += evaluator.take(frame(took, steps, rank=rank, ident=evaluator.upto + 1, step_s=STEP_S))
            if values:
                told = {name: [value] for name, value in values.items()}
                changes += evaluator.take(frame(told, [steps[-1]], rank=rank, ident=evaluator.upto + 1, step_s=STEP_S))
        if number % 3 == 1:
            evaluator = restored(evaluator)
    return changes


def only(changes: list[Change]) -> Change:
    [change] = fired(changes)
    return change


# ---- tokens_wasted


@pytest.mark.parametrize("ranks", [1, 4])
def test_much_padding_is_a_remark(ranks: int) -> None:
    change = only(
        train(TokensWasted(), [{"batch/padding_pct": 52.0 + number % 3} for number in range(20)], ranks=ranks)
    )
    found = change.finding
    assert (found.rule, found.severity) == ("tokens_wasted", "info")
    assert found.title == "53 % of the tokens are padding"
    assert "2.1 times as many as there are tokens" in found.message
    assert found.gain_pct == pytest.approx(53, abs=1)
    assert change.step >= 100


def test_little_padding_is_nothing() -> None:
    assert train(TokensWasted(), [{"batch/padding_pct": 22.0}] * 30) == []
    assert train(TokensWasted(), [{}] * 30) == []
    assert train(TokensWasted(), [{"batch/padding_pct": 80.0}] * 4) == [], "too few steps"


def test_padding_that_comes_and_goes_around_the_threshold_is_one_remark() -> None:
    changes = train(TokensWasted(), [{"batch/padding_pct": 33.0 if number < 20 else 27.0} for number in range(80)])
    assert [change.kind for change in changes if change.kind != "update"] == ["fire"]


# ---- data_repeats


def repeated(counts: Sequence[float], *, distinct: float = 100.0) -> list[dict[str, float]]:
    return [{"batch/repeats": count, **({"batch/distinct": distinct} if count else {})} for count in counts]


def test_batches_that_come_again_are_told_with_their_number() -> None:
    change = only(train(DataRepeats(), repeated([0, 0, 0, 1, 3, 8, 9, 12, *[12] * 10])))
    found = change.finding
    assert (found.severity, found.cause) == ("warning", "")
    assert "batches came again in their epoch" in found.title
    assert "the epoch has 100 different batches so far" in found.message


def test_workers_that_each_read_everything_are_named() -> None:
    readings = [{"batch/repeats": 10.0 * number, "batch/distinct": 10.0 * number} for number in range(1, 6)]
    found = only(train(DataRepeats(), readings)).finding
    assert found.cause == "several times in a row"
    assert "get_worker_info" in found.fix


def test_one_batch_is_a_remark() -> None:
    found = only(train(DataRepeats(), repeated([19, 39, 59, 79], distinct=1.0))).finding
    assert (found.severity, found.cause) == ("info", "one batch")


def test_a_loader_that_always_gives_the_same_batch_is_no_test_of_overfitting() -> None:
    found = only(train(DataRepeats(), repeated([19, 39, 59, 79], distinct=1.0), waits_s=0.002)).finding
    assert (found.severity, found.cause) == ("warning", "one batch")
    assert "sampler that is seeded for each batch" in found.fix


def test_two_repeats_are_nothing_and_old_ones_are_forgotten() -> None:
    assert train(DataRepeats(), repeated([0, 0, 1, 1, 2, 2, *[2] * 40])) == []
    assert train(DataRepeats(), repeated([0] * 40)) == []
    slowly = [number // 30 for number in range(120)]  # one in 600 steps
    assert train(DataRepeats(), repeated(slowly)) == []


def test_the_alert_is_over_when_no_batch_has_come_again_for_long() -> None:
    changes = train(DataRepeats(), repeated([0, 5, 10, *[10] * 60]))
    assert [change.kind for change in changes if change.kind != "update"] == ["fire", "resolve"]


# ---- data_bug


def bug(name: str, value: float, count: int = 6, **more: float) -> list[dict[str, float]]:
    return [{f"batch/{name}": value, **more}] * count


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("ignored_pct", "no label counts"),
        ("constant_pct", "all rows the same"),
        ("one_class_pct", "one class a batch"),
    ],
)
def test_a_defect_of_all_batches_is_named(name: str, cause: str) -> None:
    change = only(train(DataBug(), bug(name, 100.0)))
    assert (change.finding.severity, change.finding.cause) == ("warning", cause)
    assert change.step <= 160


@pytest.mark.parametrize(
    ("name", "value"), [("ignored_pct", 93.0), ("constant_pct", 40.0), ("one_class_pct", 50.0), ("ignored_pct", 0.0)]
)
def test_what_some_batches_have_is_no_defect(name: str, value: float) -> None:
    """Of a fine-tuning on answers, most labels are left out."""
    assert train(DataBug(), bug(name, value, 40)) == []


def test_a_single_reading_is_no_defect() -> None:
    readings = [{"batch/ignored_pct": 100.0 if number == 5 else 60.0} for number in range(20)]
    assert train(DataBug(), readings) == []


def test_a_mended_loader_resolves_the_alert() -> None:
    readings = [{"batch/constant_pct": 100.0 if number < 10 else 0.0} for number in range(30)]
    assert [change.kind for change in train(DataBug(), readings) if change.kind != "update"] == ["fire", "resolve"]


def test_pictures_from_0_to_255_are_a_remark_after_500_steps() -> None:
    readings = [{"batch/input_mean": 117.0 + number % 2, "batch/input_std": 66.0} for number in range(40)]
    change = only(train(DataBug(), readings))
    assert (change.finding.severity, change.finding.cause) == ("info", "not normalized")
    assert change.step >= 500


@pytest.mark.parametrize(
    ("mean", "spread"), [(0.47, 0.25), (0.13, 0.31), (0.0, 1.0), (-1.2, 0.9), (3.0, 0.0), (2.5, 8.0)],
    ids=["pictures by 255", "digits by 255", "normalized", "negative", "constant", "wide"],
)  # fmt: skip
def test_usual_inputs_are_no_remark(mean: float, spread: float) -> None:
    assert train(DataBug(), [{"batch/input_mean": mean, "batch/input_std": spread}] * 60) == []
