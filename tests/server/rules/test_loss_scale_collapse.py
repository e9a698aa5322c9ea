"""loss_scale_collapse: a GradScaler that cuts its scale again and again."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from judging import DATA
from step_job import StepJob

from perfagent_server.rules.model.loss_scale_collapse import LossScaleCollapse


def train(
    scales: Sequence[float], skipped: Sequence[float] | None = None, *, every: int = 1, first: int = 1,
    losses: Sequence[float] = (),
) -> StepJob:  # fmt: skip
    """Steps that lie `every` steps apart."""
    columns = {"amp/scale": scales, "amp/skipped": skipped or [], "loss": losses}
    columns = {name: values for name, values in columns.items() if values}
    job = StepJob(LossScaleCollapse())
    job.step = first - every
    return job.go_on(columns, rows=7, every=every)


def skipping(every: int) -> tuple[list[float], list[float]]:
    """Scale and running count of skipped steps of a scaler that skips each `every`-th step and grows back at once."""
    skipped = [float(step // every) for step in range(800)]
    return [512.0 if step % every == 0 and step else 1024.0 for step in range(800)], skipped


def test_the_collapse_of_tr8b_is_told_with_its_loss() -> None:
    scales = [1048576.0] * 300 + [1048576.0 / 2**cut for cut in (1, 2, 2, 3, 4, 5)] + [32768.0] * 10
    losses = [2.67] * 300 + [2.7, 2.9, 3.2, 3.7, 4.1, 4.37] + [4.37] * 10
    job = train(scales, losses=losses, first=17062 - 299)
    found = job.found
    assert (found.severity, found.cause, found.since_step, job.alert.step) == ("warning", "loss", 17063, 17066)
    assert (found.evidence["loss_before"], found.evidence["times"]) == (2.67, 8)


def test_the_collapse_of_tr1_is_seen_in_every_tenth_step() -> None:
    rows = json.loads((DATA / "incidents" / "bigscience.json").read_text())
    logged = [row for row in rows if 29000 <= row["iteration"] < 29100]
    scales, losses = ([row[name] for row in logged] for name in ("loss_scale", "loss"))
    assert train(scales, losses=losses, every=10, first=logged[0]["iteration"]).fired[0].step == 29050


def within(steps: int) -> list[float]:
    """Three cuts, from the first to the last of so many steps."""
    cuts = (100, 101, 100 + steps - 1)
    return [65536.0 / 2 ** sum(step >= cut for cut in cuts) for step in range(400)]


SEARCH = [65536.0 / 2**place for place in range(8)]  # overflow after overflow, down to 512
HEALTHY: dict[str, tuple[list[float], list[float] | None]] = {
    "a search": ([*SEARCH, *[512.0] * 400], [float(min(8, count)) for count in range(408)]),
    "a search from 2^32": ([2.0**32 / 2 ** (place // 2) for place in range(45)] + [1024.0] * 300, None),
    "cut now and then": ([2.0**16 / 2 ** (place // 300) for place in range(1500)], None),
    "growth and one cut every 2,000 steps": ([2.0**16 if at % 2001 else 2.0**15 for at in range(1, 9000)], None),
    "fixed below 1": ([0.25] * 500, None),
    "5 % skipped": skipping(20),
    "three cuts in eleven steps": (within(11), None),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_scalers_raise_nothing(kind: str) -> None:
    assert train(*HEALTHY[kind]).changes == []


def test_three_cuts_in_ten_steps_are_a_warning_until_it_holds() -> None:
    job = train(within(10))
    assert (job.alert.step, job.found.since_step, job.found.severity, job.found.cause) == (110, 101, "warning", "")
    assert job.kinds == ["fire", "resolve"]
    assert job.changes[-1].step == 110 + 50


@pytest.mark.parametrize("counted", [True, False])
def test_more_than_a_twentieth_of_the_steps_skipped_is_told(counted: bool) -> None:
    scales, skipped = skipping(19)
    job = train(scales, skipped if counted else None)
    assert (job.fired[0].finding.severity, job.fired[0].finding.cause) == ("warning", "skipped steps")
    assert job.fired[0].finding.evidence["skipped"] > 10
    assert job.fired[0].step == 305


def test_a_scale_below_one_is_critical_also_in_the_search() -> None:
    job = train([65536.0 / 2**place for place in range(30)], [float(place) for place in range(30)])
    assert (job.found.severity, job.found.cause, job.alert.step) == ("critical", "minimum", 18)
    assert job.found.evidence["scale"] == 0.5


def test_a_scaler_that_still_skips_at_its_minimum_is_critical() -> None:
    scales = [*[256.0] * 40, 128.0, 64.0, 32.0, 16.0, 8.0, 4.0, 2.0, *[1.0] * 20]
    found = train(scales, [float(max(0, place - 39)) for place in range(len(scales))]).changes[-1].finding
    assert (found.severity, found.cause) == ("critical", "minimum")
