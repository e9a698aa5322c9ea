"""loss_scale_collapse: a GradScaler that cuts its scale again and again."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from judging import DATA, fired, frame, make_evaluator, restored

from perfagent_server.alerts.state_machine import Change
from perfagent_server.rules.model.loss_scale_collapse import LossScaleCollapse

RULES = (LossScaleCollapse(),)
SEARCH = [65536.0 / 2**place for place in range(8)]  # overflow after overflow, down to 512


def judge(scales: Sequence[float], *, every: int = 1, first: int = 1, **more: Sequence[float]) -> list[Change]:
    """Scales of steps that lie `every` steps apart. more: other series of the same steps."""
    evaluator = make_evaluator(rules=RULES)
    changes: list[Change] = []
    columns = {"amp/scale": scales, **{name.replace("_", "/", 1): values for name, values in more.items()}}
    for begin in range(0, len(scales), 7):
        steps = [first + every * place for place in range(begin, min(begin + 7, len(scales)))]
        piece = {name: list(values[begin : begin + 7]) for name, values in columns.items()}
        changes += evaluator.take(frame(piece, steps, ident=evaluator.upto + 1))
        evaluator = restored(evaluator) if begin % 70 == 0 else evaluator
    return changes


def skipping(steps: int, every: int) -> tuple[list[float], list[float]]:
    """Scale and running count of skipped steps of a scaler that skips each `every`-th step and grows back at once."""
    skipped = [float(step // every) for step in range(steps)]
    scales = [512.0 if step % every == 0 and step else 1024.0 for step in range(steps)]
    return scales, skipped


def test_the_collapse_of_tr8b_is_told_with_its_loss() -> None:
    steps = 300
    scales = [1048576.0] * steps + [1048576.0 / 2**cut for cut in (1, 2, 2, 3, 4, 5)] + [32768.0] * 10
    losses = [2.67] * steps + [2.7, 2.9, 3.2, 3.7, 4.1, 4.37] + [4.37] * 10
    [change] = fired(judge(scales, loss=losses, first=17062 - steps + 1))
    found = change.finding
    assert found.severity == "warning"
    assert change.step <= 17066
    assert found.since_step == 17063
    assert found.cause == "loss"
    assert "fell from 1,048,576 to" in found.message
    assert "while the loss rose from 2.67" in found.message


def test_the_collapse_of_tr1_is_seen_in_a_log_of_every_tenth_step() -> None:
    rows = json.loads((DATA / "incidents" / "bigscience.json").read_text())
    logged = [row for row in rows if 29000 <= row["iteration"] < 29100]
    changes = judge(
        [row["loss_scale"] for row in logged],
        loss=[row["loss"] for row in logged],
        every=10,
        first=logged[0]["iteration"],
    )
    assert fired(changes)[0].step == 29050


@pytest.mark.parametrize(
    ("scales", "skipped"),
    [
        ([*SEARCH, *[512.0] * 400], [*range(8), *[8] * 400]),
        ([2.0**32 / 2 ** (place // 2) for place in range(45)] + [1024.0] * 300, None),
        ([1024.0 * 2 ** (place // 100) for place in range(1000)], None),
        ([2.0**16 / 2 ** (place // 300) for place in range(1500)], None),
        ([1.0] * 500, None),
        ([0.25] * 500, None),
        (*skipping(800, 40),),
    ],
    ids=["search", "a search from 2^32", "grows", "cut now and then", "no scaling", "fixed below 1", "2.5 % skipped"],
)
def test_healthy_scalers_raise_nothing(scales: list[float], skipped: list[float] | None) -> None:
    more = {} if skipped is None else {"amp_skipped": [float(count) for count in skipped]}
    assert judge(scales, **more) == []


def test_growth_and_one_cut_every_2000_steps_raise_nothing() -> None:
    scales = [2.0**16 if place % 2001 else 2.0**15 for place in range(1, 9000)]
    assert judge(scales) == []


@pytest.mark.parametrize("counted", [True, False])
def test_more_than_a_twentieth_of_the_steps_skipped_is_a_warning(*, counted: bool) -> None:
    scales, skipped = skipping(800, 12)
    changes = judge(scales, **({"amp_skipped": skipped} if counted else {}))
    found = fired(changes)[0].finding
    assert found.severity == "warning"
    assert "of the newest 200 steps were skipped" in found.title
    assert fired(changes)[0].step < 260


def test_a_scale_below_one_is_critical_also_in_the_search() -> None:
    scales = [65536.0 / 2**place for place in range(30)]
    [change] = fired(judge(scales, amp_skipped=[float(place) for place in range(30)]))
    assert change.finding.severity == "critical"
    assert change.finding.cause == "minimum"
    assert change.step == 18
    assert change.finding.title.startswith("The loss scale has fallen to 0.5")


def test_a_scaler_that_still_skips_at_its_minimum_is_critical() -> None:
    scales = [*[256.0] * 40, 128.0, 64.0, 32.0, 16.0, 8.0, 4.0, 2.0, *[1.0] * 20]
    skipped = [float(max(0, place - 39)) for place in range(len(scales))]
    changes = judge(scales, amp_skipped=skipped)
    assert changes[-1].finding.severity == "critical"
    assert changes[-1].finding.cause == "minimum"


def test_the_alert_is_resolved_when_the_scale_holds() -> None:
    scales = [*[65536.0] * 100, 32768.0, 16384.0, 8192.0, *[8192.0] * 300]
    changes = judge(scales)
    assert [one.kind for one in changes if one.kind != "update"] == ["fire", "resolve"]
    assert changes[-1].step < 200
