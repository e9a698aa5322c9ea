"""How often the interval of a ratio holds the truth, on series whose truth is known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from case_selection import everyday

from perfagent_server.comparing.ratio_interval import block_length, ratio_of

Values = npt.NDArray[np.float64]


def dependent(random: np.random.Generator, n: int, correlation: float, *, tail: float) -> Values:
    """Step times around 1: an AR(1) in their logarithm, and now and then one that takes several times as long."""
    noise = random.normal(0, 0.05, n)
    level = np.empty(n)
    level[0] = noise[0] / np.sqrt(1 - correlation**2)
    for i in range(1, n):
        level[i] = correlation * level[i - 1] + noise[i]
    times: Values = np.exp(level) * np.where(random.random(n) < tail, random.pareto(1.5, n) + 2, 1)
    return times


@pytest.mark.parametrize(("correlation", "tail"), everyday(1, [(0.5, 0.02), (0.0, 0.0), (0.8, 0.02), (0.9, 0.0)]))
def test_the_interval_holds_the_truth_as_often_as_it_says(correlation: float, tail: float) -> None:
    random = np.random.default_rng(1)
    pairs = [[dependent(random, 1000, correlation, tail=tail) for _ in range(2)] for _ in range(100)]
    answers = [found for first, second in pairs if (found := ratio_of(np.median, first, second * 0.8)) is not None]
    held = sum(found.low <= 0.8 <= found.high for found in answers)
    assert len(answers) >= 90
    assert held >= 0.88 * len(answers), f"{held} of {len(answers)}; 95 % are promised, three standard errors are 7 %"


@pytest.mark.parametrize(
    ("steps", "correlation"), everyday(2, [(20, 0.0), (100, 0.5), (50, 0.0), (60, 0.5), (100, 0.9), (300, 0.9)])
)
def test_short_runs_are_seldom_told_apart_where_there_is_nothing(steps: int, correlation: float) -> None:
    random = np.random.default_rng(5)
    wrong = 0
    for _ in range(100):
        first, second = (dependent(random, steps, correlation, tail=0.02) for _ in range(2))
        found = ratio_of(np.median, first, second)
        wrong += found is not None and not found.low <= 1 <= found.high
    assert wrong <= 12


def test_blocks_are_as_long_as_the_dependence() -> None:
    random = np.random.default_rng(3)
    lengths = [block_length(dependent(random, 2000, one, tail=0.02)) for one in (0.0, 0.8, 0.95)]
    assert lengths[0] <= 20 < lengths[1] < lengths[2] <= 500


@pytest.mark.parametrize(("first", "second"), [([1.0] * 19, [1.0] * 99), ([0.0] * 50, [1.0] * 50)])
def test_too_little_or_nothing_to_divide_by_is_no_answer(first: list[float], second: list[float]) -> None:
    assert ratio_of(np.median, np.array(first), np.array(second)) is None


def test_constant_values_have_an_interval_without_width() -> None:
    found = ratio_of(np.median, np.full(50, 2.0), np.full(50, 1.0))
    assert found is not None
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)
