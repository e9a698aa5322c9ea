"""Quantities as people read them."""

from __future__ import annotations

import math

from perfagent.wire.quantities import duration, figure, prefixed, quantity, scaled_unit, size


def test_durations_and_sizes_have_the_unit_that_fits() -> None:
    times = {0.0: "0 s", 180e-6: "180 µs", 0.0423: "42.3 ms", 1.25: "1.25 s", 90.0: "90 s", 185.0: "3 min 5 s"}
    assert [duration(seconds) for seconds in (*times, 7800.0)] == [*times.values(), "2 h 10 min"]
    assert [size(value) for value in (12, 1536, 4.41 * 2**30, 2**60)] == ["12 B", "1.5 KiB", "4.41 GiB", "1,024 PiB"]


def test_figures_have_the_unit_of_their_metric() -> None:
    assert [figure(name, 0.413) for name in ("mfu", "loss", "step_time_s")] == ["41.3 %", "0.413", "413 ms"]
    assert [quantity(value, "s") for value in (math.nan, math.inf, -math.inf)] == ["NaN", "Inf", "-Inf"]
    assert quantity(3.2e14, "FLOP/s") == "320 TFLOP/s"
    assert scaled_unit("step_time_s", 0.02) == (1e-3, "ms")


def test_prefixed_numbers_have_three_digits() -> None:
    shown = {0: "0", 5: "5", 0.0123: "0.0123", 2.1: "2.10", 51_849: "51.8k", 999.6: "1.00k", 3e-5: "3.00e-5"}
    assert [prefixed(value) for value in (*shown, 1e21)] == [*shown.values(), "1.00e+21"]
