"""The geometry of the charts of a report."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from perfagent.wire import Series
from perfagent_client.report.line_chart import BOX, AlertMark, Drawing, draw, scaled_unit


def of(values: list[float], *, high: list[float] | None = None, width: int = 1) -> Series:
    """A bucket a value, each so many steps wide."""
    return Series(
        name="loss", rank="all", unit="", exact=high is None, step=[1 + width * i for i in range(len(values))], min=values,
        max=high or values, mean=values, count=[1] * len(values), nonfinite=[not math.isfinite(value) for value in values],
        bucket_steps=width,
    )  # fmt: skip


def points(drawing: Drawing) -> list[list[tuple[float, float]]]:
    return [pairs(path) for path in drawing.line.split("M")[1:]]


def pairs(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([-\d.e]+),([-\d.e]+)", path)]


def test_line_runs_from_corner_to_corner_and_alerts_are_marked() -> None:
    marks = [AlertMark(2, 1, "critical", "a"), AlertMark(3, 2, "info", "b"), AlertMark(0, 3, "info", "c")]
    drawing = draw(of([0.0, 5.0, 10.0]), marks, from_zero=True)
    [line] = points(drawing)
    assert line[0] == (BOX.left, BOX.bottom)
    assert line[-1][0] == BOX.right and BOX.top < line[-1][1] < BOX.top + 12
    middle = pytest.approx((BOX.left + BOX.right) / 2, abs=0.1)
    assert line[1][0] == middle
    assert [mark.x for mark in drawing.marks] == [middle, BOX.right]


def test_a_spike_within_a_bucket_is_as_high_as_its_value() -> None:
    drawing = draw(of([1.0] * 400, high=[1.0] * 200 + [50.0] + [1.0] * 199, width=250))
    heights = [y for _, y in pairs(drawing.band)]
    assert min(heights) < BOX.top + 15
    assert sum(height < BOX.bottom - 20 for height in heights) == 1


def test_nan_parts_the_line_and_is_marked_where_it_is() -> None:
    drawing = draw(of([1.0, 2.0, math.nan, math.inf, 3.0, math.nan, 1.0, 2.0]))
    assert [len(line) for line in points(drawing)] == [2, 2]
    [dot] = pairs(drawing.dots)  # a value between two that are not finite
    marked = re.findall(r"M([\d.]+),[\d.]+h([\d.]+)", drawing.nonfinite)
    (first, width), (_, narrow) = [(float(x), float(w)) for x, w in marked]
    assert first > points(drawing)[0][-1][0] and width > 1.9 * narrow
    assert dot[0] == pytest.approx(first + width, abs=0.2)


def test_only_a_loss_over_decades_has_a_logarithmic_axis() -> None:
    drawing = draw(of([1000.0, 100.0, 10.0, 1.0]), may_be_log=True)
    steps = [round(after[1] - before[1]) for before, after in itertools.pairwise(points(drawing)[0])]
    assert drawing.is_log and len(set(steps)) == 1, "each decade is as high as the others"
    assert [label.text for label in drawing.y_labels] == ["1", "10", "100", "1000"]
    for values, may_be_log in (([1000.0, 1.0], False), ([4.0, 2.0], True), ([1000.0, 0.0], True)):
        assert not draw(of(values), may_be_log=may_be_log).is_log


def test_charts_over_the_same_steps_have_the_same_axis() -> None:
    assert draw(of([1.0] * 101), steps=(1, 101)).x_labels == draw(of([1.0]), steps=(1, 101)).x_labels


def test_units_fit_the_values() -> None:
    for name, largest, unit in (
        ("step_time_s", 0.02, "ms"), ("step_time_s", 3e-5, "µs"), ("step_time_s", 300.0, "min"), ("step_time_s", 0.0, "s"),
        ("process/rss_bytes", 5 * 2.0**30, "GiB"), ("mfu", 0.4, "%"), ("flops_per_s", 3e13, "TFLOP/s"), ("loss", 3.0, ""),
    ):  # fmt: skip
        assert scaled_unit(name, largest)[1] == unit


@pytest.mark.parametrize("values", [[], [math.nan], [0.0], [7.0, 7.0], [-1e308, 1e308], [5e-324, 1e308]], ids=str)
def test_no_values_break_a_chart(values: list[float]) -> None:
    drawing = draw(of(values), may_be_log=True)
    assert len(drawing.y_labels) < 12 and len(drawing.x_labels) < 12
    for x, y in [*(point for line in points(drawing) for point in line), *pairs(drawing.dots)]:
        assert BOX.left <= x <= BOX.right and BOX.top <= y <= BOX.bottom
