"""Number formats, samples, ticks and the horizontal axis of the scripts. Chromium imports each module."""

from __future__ import annotations

from typing import Any

import pytest
from builders import ServerProcess
from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

held: dict[int, Page] = {}
"""The one page of this file, by the browser that it is open in."""


@pytest.fixture
def page(site: ServerProcess, browser: Browser) -> Page:
    if id(browser) not in held:
        opened = held[id(browser)] = browser.new_page()
        opened.goto(f"{site.url}/settings")
    return held[id(browser)]


def call(page: Page, module: str, expression: str, given: Any = None) -> Any:
    """The value of an expression in which `m` is the module and `x` what is given."""
    return page.evaluate(f"async x => {{ const m = await import('/assets/{module}'); return {expression}; }}", given)


def test_numbers_have_three_significant_digits_and_a_prefix(page: Page) -> None:
    shown = {
        0: "0", 5: "5", 0.0123: "0.0123", 2.1549: "2.15", 51_849: "51.8k", 999.6: "1.00k", 3e-5: "3.00e−5",
        -1234.5: "−1.23k", 1e21: "1.00e+21", 7.4e15: "7.40P",
        # what is not yet one is not shown as one
        1: "1", 0.9999: "0.9999", -0.99996: "−0.99996", 0.9994: "0.999", 1.0001: "1.00", 0.99999999: "1.000000",
    }  # fmt: skip
    assert call(page, "lib/numbers.js", "x.map(m.si)", list(shown)) == list(shown.values())
    assert call(page, "lib/numbers.js", "[NaN, Infinity, -Infinity].map(m.si)") == ["NaN", "Inf", "−Inf"]
    spelled = call(page, "lib/numbers.js", '["NaN", "-Infinity", "x", null, 2].map(m.numberOf).map(String)')
    assert spelled == ["NaN", "-Infinity", "null", "null", "2"]


def test_values_and_durations_come_in_units_that_fit(page: Page) -> None:
    for name, value, *shown in (
        ("step_time_s", 0.0421, "42.1", "ms"), ("step_time_s", 90, "90", "s"),
        ("cuda/allocated_bytes", 0.2 * 2**30, "0.200", "GiB"), ("mfu", 0.413, "41.3", "%"), ("my/own", 12_345, "12.3k", ""),
    ):  # fmt: skip
        assert call(page, "lib/metrics.js", "m.valueAndUnit(m.metricOf(x[0]), x[1])", [name, value]) == shown
    durations = call(page, "lib/times.js", "[0.04, 0.43, 5.9, 61, 3660, 90061].map(m.duration)")
    assert durations == ["0.1 s", "0.4 s", "5 s", "1 min 1 s", "1 h 1 min", "1 d 1 h"]


def test_samples_of_one_step_are_put_together_by_their_weight(page: Page) -> None:
    data = {
        "step": [1, 1, 2], "time": [1, 2, 3], "min": [1, 0, 5], "max": [1, 4, 5], "mean": [1, 3, 5], "count": [1, 3, 1],
        "bad": [0, 1, 0],
    }  # fmt: skip
    rows = call(page, "charts/samples.js", "m.byStep(x)", data)
    assert rows["step"] == [1, 2]
    assert rows["mean"] == [pytest.approx((1 + 2 * 3) / 3), 5]  # one of the three is not finite, and weighs nothing
    assert (rows["min"], rows["max"], rows["bad"]) == ([0, 5], [4, 5], [1, 0])
    found = call(page, "charts/samples.js", "x.map((value) => m.lastAtOrBefore([1, 3, 3, 8], value))", [0, 1, 3, 5, 9])
    assert found == [-1, 0, 2, 2, 3]


def test_a_band_never_reaches_over_a_gap(page: Page) -> None:
    x, y = call(page, "charts/samples.js", "m.bandOf([1, 2, 3, 4], [0, 0, null, 1], [1, 2, null, 3])")
    assert x == [1, 2, 2, 1, None, 4, 4, None]
    assert y == [0, 0, 2, 1, None, 1, 3, None]


def test_ticks_of_a_logarithmic_axis_are_few_and_written_out(page: Page) -> None:
    wide, narrow, tiny = call(page, "charts/ticks.js", "[[-3, 4], [4, 5], [0.01, 0.02]].map(m.logTicks)")
    assert wide["ticktext"][0] in ("1.00e−3", "0.00100")
    assert len(wide["tickvals"]) <= 6
    assert narrow["ticktext"] == ["10.0k", "20.0k", "50.0k", "100k"]
    assert len(tiny["tickvals"]) == 3


def test_axis_leads_from_steps_to_times_or_a_series_and_back(page: Page) -> None:
    step, epoch, relative, *back, log, clock_is_log = page.evaluate(
        """async () => {
        const m = await import('/assets/charts/x_axis.js');
        const data = {step: [0, 10, 20], time: [100, 200, 400], mean: [0, 1, 4]};
        const board = {charts: new Map([["epoch", {data}]]), firstStep: 0, lastStep: 20, started: 100,
          window: () => null, fixed: () => false};
        const axis = new m.XAxis(board), plot = {};
        const there = (mode) => { axis.mode = mode; return [5, 15].map((step) => axis.ofStep(step)); };
        const back = (mode) => there(mode).map((x) => axis.stepAt(x));
        const found = [...["step", "epoch", "relative"].map(there), ...["step", "epoch", "relative", "clock"].map(back)];
        axis.mode = "step"; axis.wantsLog = true; axis.describe(plot); axis.mode = "clock";
        return [...found, plot, axis.isLog]; }"""
    )
    assert step == [5, 15]
    assert epoch == [0.5, 2.5]
    assert relative == [50 / 60, 200 / 60]  # minutes since the start, for the run took five
    assert back == [[5, 15]] * 4
    assert (log["type"], log["range"][0], clock_is_log) == ("log", 0, False)


def test_many_requests_at_once_are_one_a_second(site: ServerProcess, browser: Browser) -> None:
    page = browser.new_page()
    page.clock.install()
    page.goto(f"{site.url}/settings")
    page.evaluate(
        "async () => { const m = await import('/assets/lib/soonest.js'); window.acts = 0; window.begun = performance.now();"
        " window.soonest = new m.Soonest(() => { window.acts += 1; }, 1000); }"
    )
    for _ in range(40):
        page.evaluate("() => window.soonest.within(0)")
        page.clock.run_for(100)
    page.clock.run_for(1000)
    acts, lasted_ms = page.evaluate("() => [window.acts, performance.now() - window.begun]")
    assert 3 <= acts <= 1 + lasted_ms / 1000
    page.close()
