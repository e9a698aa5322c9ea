"""The geometry of the charts of a report."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from perfagent.wire import Series
from perfagent_client.report.line_chart import BOX, AlertMark, Drawing, draw, scaled_unit


def of(
    values: list[float],
    *,
    name: str = "loss",
    low: list[float] | None = None,
    high: list[float] | None = None,
    width: int = 1,
) -> Series:
    """A bucket a value, each so many steps wide."""
    bad = [0 if math.isfinite(value) else 1 for value in values]
    return Series(
        name="loss", rank="all", unit="", exact=low is None, step=[1 + width * i for i in range(len(values))], min=low or values,
        max=high or values, mean=values, count=[1] * len(values), nonfinite=bad, bucket_steps=width,
    )  # fmt: skip


def points(drawing: Drawing) -> list[list[tuple[float, float]]]:
    return [pairs(path) for path in drawing.line.split("M")[1:]]


def pairs(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([-\d.e]+),([-\d.e]+)", path)]


def test_the_line_runs_from_corner_to_corner() -> None:
    [line] = points(draw(of([0.0, 5.0, 10.0]), from_zero=True))
    assert line[0] == (BOX.left, BOX.bottom)
    assert line[-1][0] == BOX.right and BOX.top < line[-1][1] < BOX.top + 12
    assert line[1][0] == pytest.approx((BOX.left + BOX.right) / 2, abs=0.1)


def test_a_spike_within_a_bucket_is_as_high_as_its_value() -> None:
    count = 400
    drawing = draw(of([1.0] * count, low=[1.0] * count, high=[1.0] * 200 + [50.0] + [1.0] * 199, width=250))
    heights = [y for _, y in pairs(drawing.band)]
    assert min(heights) < BOX.top + 15
    assert sum(height < BOX.bottom - 20 for height in heights) == 1


def test_nan_parts_the_line_and_is_marked_where_it_is() -> None:
    drawing = draw(of([1.0, 2.0, math.nan, math.inf, 3.0, math.nan, 1.0, 2.0]))
    assert [len(line) for line in points(drawing)] == [2, 2]
    [dot] = pairs(drawing.dots)  # a value between two that are not finite
    (first, width), (_, narrow) = [
        (float(x), float(w)) for x, w in re.findall(r"M([\d.]+),[\d.]+h([\d.]+)", drawing.nonfinite)
    ]
    assert first > points(drawing)[0][-1][0] and width > 1.9 * narrow
    assert dot[0] == pytest.approx(first + width, abs=0.2)


def test_a_loss_over_decades_has_a_logarithmic_axis_and_others_do_not() -> None:
    drawing = draw(of([1000.0, 100.0, 10.0, 1.0]), may_be_log=True)
    heights = [y for _, y in points(drawing)[0]]
    steps = [round(after - before) for before, after in itertools.pairwise(heights)]
    assert drawing.is_log and len(set(steps)) == 1, "each decade is as high as the others"
    assert [label.text for label in drawing.y_labels] == ["1", "10", "100", "1000"]
    assert not draw(of([1000.0, 1.0]), may_be_log=False).is_log
    assert not draw(of([4.0, 2.0]), may_be_log=True).is_log, "less than two decades"
    assert not draw(of([1000.0, 0.0]), may_be_log=True).is_log, "0 is on no logarithmic axis"


def test_charts_over_the_same_steps_have_the_same_axis() -> None:
    long, short = draw(of([1.0] * 101), steps=(1, 101)), draw(of([1.0]), [AlertMark(51, 1, "info", "")], steps=(1, 101))
    assert long.x_labels == short.x_labels
    assert [mark.x for mark in short.marks] == [pytest.approx((BOX.left + BOX.right) / 2, abs=0.1)]


def test_alerts_are_marked_at_their_steps() -> None:
    drawing = draw(
        of([1.0] * 101),
        [AlertMark(51, 1, "critical", "a"), AlertMark(101, 2, "info", "b"), AlertMark(0, 3, "info", "c")],
    )
    assert [mark.x for mark in drawing.marks] == [pytest.approx((BOX.left + BOX.right) / 2, abs=0.1), BOX.right]


@pytest.mark.parametrize(
    ("name", "largest", "unit"),
    [
        ("step_time_s", 0.02, "ms"), ("step_time_s", 3e-5, "µs"), ("step_time_s", 12.0, "s"), ("step_time_s", 300.0, "min"),
        ("step_time_s", 0.0, "s"), ("process/rss_bytes", 5 * 2.0**30, "GiB"), ("gpu/utilization_pct", 90.0, "%"),
        ("mfu", 0.4, "%"), ("flops_per_s", 3e13, "TFLOP/s"), ("loss", 3.0, ""),
    ],
)  # fmt: skip
def test_units_fit_the_values(name: str, largest: float, unit: str) -> None:
    assert scaled_unit(name, largest)[1] == unit


@pytest.mark.parametrize("values", [[], [math.nan], [0.0], [7.0, 7.0], [-1e308, 1e308], [5e-324, 1e308], [-3.0, -2.0]])
@pytest.mark.parametrize("may_be_log", [True, False])
@pytest.mark.parametrize("from_zero", [True, False])
def test_no_values_break_a_chart(values: list[float], may_be_log: bool, from_zero: bool) -> None:
    drawing = draw(of(values), may_be_log=may_be_log, from_zero=from_zero)
    assert len(drawing.y_labels) < 12 and len(drawing.x_labels) < 12
    for x, y in [*(point for line in points(drawing) for point in line), *pairs(drawing.dots)]:
        assert BOX.left <= x <= BOX.right and BOX.top <= y <= BOX.bottom
