"""step_time_tail: single steps that take far longer than the others, more of them than at the beginning."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from step_job import StepJob

from perfagent_server.rules.speed.step_time_tail import StepTimeTail


def train(times: Sequence[float], *, phase: str = "other", load: tuple[float, float] | None = None) -> StepJob:
    """Steps that take so long; what they take more than 100 ms is in that phase. load: how much of two cores all
    programs use, and how much of one core the run, in percent."""
    more = [max(0.0, time - 0.1) for time in times]
    columns = {"step_time_s": times, "phase/forward_s": [time - one for time, one in zip(times, more, strict=True)]}
    columns[f"phase/{phase}_s"] = [one if one > 0.01 or phase != "eval" else 0.0 for one in more]
    if load is not None:
        known = {"host/cores": 2.0, "host/cpu_pct": load[0], "process/cpu_pct": load[1]}
        columns |= {name: [value] * len(times) for name, value in known.items()}
    return StepJob(StepTimeTail(), restarts=40).go_on(columns, rows=10)


def noisy(steps: int, *, slow_every: int = 0, slow: float = 0.0, by_chance: float = 0.0, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    times = [0.1 * (1 + 0.03 * abs(draw.gauss(0, 1))) for _ in range(steps)]
    return [
        slow if (slow_every and step % slow_every == 0) or draw.random() < by_chance else time
        for step, time in enumerate(times, 1)
    ]


TAIL = noisy(600) + noisy(1000, by_chance=0.03, slow=0.5, seed=1)


@pytest.mark.parametrize(
    ("times", "phase", "told"),
    [
        (TAIL, "other", ("warning", "")),
        (noisy(600) + noisy(1000, slow_every=40, slow=0.4, seed=1), "other", ("info", "regular")),
        (TAIL, "data", ("warning", "data")),
        (noisy(600) + noisy(1000, by_chance=0.014, slow=0.35, seed=2), "other", ("info", "")),
        (noisy(3000, slow_every=50, slow=0.8), "other", None),
        (noisy(3000, by_chance=0.02, slow=0.6), "other", None),
        (noisy(3000, slow_every=500, slow=5.0), "other", None),
        ([*noisy(1000), *[0.3] * 300, *noisy(1700, seed=1)], "other", None),
        ([*noisy(1000), *noisy(30, by_chance=0.3, slow=0.5, seed=2)], "other", None),
        (noisy(600) + noisy(1500, slow_every=20, slow=1.0, seed=1), "eval", None),
    ],
    ids=[
        "by chance", "regular", "the loader's", "they cost little", "regular from the start", "tail from the start", "a save",
        "slow stretch", "short burst", "evaluations",
    ],
)  # fmt: skip
def test_slow_steps_that_began_later_are_told(times: list[float], phase: str, told: tuple[str, str] | None) -> None:
    job = train(times, phase=phase)
    assert [(one.finding.severity, one.finding.cause) for one in job.fired] == ([told] if told else [])
    for change in job.fired:
        assert (change.finding.evidence["phase"], 600 < change.step < 1600) == (phase, True)
        assert change.finding.cause != "regular" or change.finding.evidence["every_steps"] == 40
        assert times is not TAIL or change.finding.evidence["share_pct"] == pytest.approx(10, abs=4)


@pytest.mark.parametrize(
    ("count", "slow", "fires"), [(9, 0.5, False), (11, 0.5, True), (11, 0.2, False), (11, 0.201, True)]
)
def test_ten_steps_of_twice_the_usual_tail_are_told(count: int, slow: float, fires: bool) -> None:
    """All of the first 400 steps take 0.1 s."""
    times = [0.1] * 1500
    for number in range(count):
        times[500 + 80 * number] = slow
    assert len(train(times).fired) == fires


def test_it_is_over_when_the_newest_thousand_steps_are_even() -> None:
    assert train(TAIL + noisy(1200, seed=3)).kinds == ["fire", "resolve"]


@pytest.mark.parametrize(
    ("load", "severity"), [((100.0, 159.0), "info"), ((100.0, 161.0), "warning"), ((60.0, 110.0), "warning")]
)
def test_slow_steps_beside_other_busy_programs_are_a_remark(load: tuple[float, float], severity: str) -> None:
    """Others use a fifth of the cores."""
    assert train(noisy(600) + noisy(1200, slow_every=40, slow=0.5), load=load).severities == [severity]
