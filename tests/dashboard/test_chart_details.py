"""Charts of unusual data: gaps, single steps, windows that move on, requests that fail. What is drawn is what was
measured."""

from __future__ import annotations

import contextlib
import math
import time
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from playwright.sync_api import Error, Route
from recorded import log, send

if TYPE_CHECKING:
    from builders import ServerProcess
    from conftest import OpenTab, Tab

pytestmark = [pytest.mark.browser, pytest.mark.long]

nan = math.nan
BAND, LOW, HIGH, MEAN, SMOOTH, NONFINITE, POINTS = range(7)
# From where to where each closed part of a chart's filled area goes, as it is on screen.
STRETCHES = """plot => {
  const parts = [...plot.querySelectorAll('.js-fill')].flatMap((path) => path.getAttribute('d').split('Z').filter(Boolean));
  return parts.map((part) => {
    const xs = [...part.matchAll(/(-?[\\d.]+),-?[\\d.]+/g)].map((pair) => plot._fullLayout.xaxis.p2l(Number(pair[1])));
    return [Math.min(...xs), Math.max(...xs)];
  });
}"""
Y_LABELS = "plot => [...plot.querySelectorAll('.ytick text')].map((label) => label.textContent)"
X_LABELS = "plot => [...plot.querySelectorAll('.xtick text')].map((label) => label.textContent)"
BELOW_THE_FOLD = """() => document.querySelectorAll('[data-name="step_time_s"], [data-name^="phase/"]').forEach(
  (card) => { card.style.display = 'none'; })"""
CUT_OFF = """plot => [...plot.querySelectorAll('.ytick text')].filter(
  (label) => label.getBoundingClientRect().left < plot.getBoundingClientRect().left).length"""


@pytest.fixture
def run() -> str:
    return f"run-{uuid.uuid4().hex[:8]}"


def look(page: Tab, name: str, expression: str) -> Any:
    """What a JavaScript function of a chart's plot answers."""
    return page.page.evaluate(
        f'name => ({expression})(document.querySelector(`#run-charts [data-name="${{name}}"] .plot`))', name
    )


def shown(page: Tab, name: str, part: str) -> str:
    return page.page.locator(f'#run-charts [data-name="{name}"] {part}').inner_text()


def loaded(page: Tab, *names: str) -> None:
    for name in names:
        page.wait(
            'name => document.querySelector(`#run-charts [data-name="${name}"] .plot`)?.dataset.points >= 1',
            argument=name,
        )


def point_at(page: Tab, name: str, x: float) -> None:
    """The mouse on a chart, at a value of its horizontal axis."""
    axis = "const axis = plot._fullLayout.xaxis;"
    at = look(
        page, name, f"plot => {{ {axis} return plot.getBoundingClientRect().left + axis._offset + axis.l2p({x}) }}"
    )
    box = page.page.locator(f'#run-charts [data-name="{name}"] .plot').bounding_box()
    assert box is not None
    page.page.mouse.move(at, box["y"] + 60)
    page.wait('name => !document.querySelector(`#run-charts [data-name="${name}"] .cursor`).hidden', argument=name)


def two_ranks(site: ServerProcess, run: str, low: np.ndarray, high: np.ndarray) -> None:  # type: ignore[type-arg]
    """A series whose buckets reach from low to high."""
    for rank, values in enumerate((low, high)):
        send(site, run, {"loss": values}, np.arange(1, len(values) + 1), rank=rank)


# --- gaps -------------------------------------------------------------------------------------------------------------


def test_the_band_ends_at_a_gap_and_begins_again_behind_it(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 101)
    low = np.where((x >= 40) & (x <= 60), nan, 2.0 + np.sin(x / 9))
    two_ranks(site, run, low, low + 0.5)
    page = tab(f"/run/{run}")
    page.drawn(1)
    stretches = sorted(look(page, "loss", STRETCHES))
    assert len(stretches) == 2
    assert stretches[0] == pytest.approx([1, 39], abs=0.5)
    assert stretches[1] == pytest.approx([61, 100], abs=0.5)


def test_single_values_with_gaps_have_no_band(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 201)
    send(site, run, {"loss": np.where(np.isin(x, (60, 130)), nan, 5 + 3 * np.sin(x / 12)), "cross": np.sin(x / 12)}, x)
    page = tab(f"/run/{run}?log=1")
    page.drawn(2)
    assert look(page, "loss", STRETCHES) == []
    assert look(page, "cross", STRETCHES) == [], "a logarithmic axis has gaps of its own"


def test_points_between_gaps_are_dots(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 22)
    send(site, run, {"loss": np.where(x % 2 == 1, 1.0 * x, nan)}, x)
    page = tab(f"/run/{run}")
    page.drawn(1)
    dots = "plot => [...plot.querySelectorAll('.trace.scatter .points path')].length"
    assert look(page, "loss", dots) == 11 + 10  # 10 of them are the marks of what is not finite


def test_live_samples_go_on_behind_a_gap_and_a_dot_becomes_a_line(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 51)
    send(site, run, {"loss": 2.0 + 0.0 * x}, x)
    page = tab(f"/run/{run}")
    page.drawn(1)
    page.live()
    traces = "document.querySelector('#run-charts [data-name=\"loss\"] .plot').data"
    log(site, run, 51, loss=nan)
    log(site, run, 52, loss=1.5)
    page.wait(f"() => {traces}[{POINTS}].x.join() === '52'")
    log(site, run, 53, loss=1.4)
    page.wait(f"() => {traces}[{MEAN}].x.at(-1) === 53 && {traces}[{POINTS}].x.length === 0")
    assert page.page.evaluate(f"{traces}[{MEAN}].y[50]") is None


# --- windows ----------------------------------------------------------------------------------------------------------


def test_a_window_that_moves_on_is_scaled_by_what_it_shows(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 151)
    first = {
        "loss": np.where(x == 140, nan, 100.0 - x / 10),
        "step_time_s": 1.0 + 0.0 * x,
        "phase/data_s": 0.9 + 0.0 * x,
    }
    send(site, run, {**first, "phase/forward_s": 0.1 + 0.0 * x}, x)
    page = tab(f"/run/{run}?x=last100")
    page.drawn(3)
    page.live()
    assert shown(page, "loss", ".flag") == "1 NaN or Inf in view"
    for seq, start in enumerate((151, 251), 2):
        x = np.arange(start, start + 100)
        later = {"loss": 1 + 0.1 * np.sin(x / 9), "step_time_s": 0.1 + 0.0 * x, "phase/data_s": 0.01 + 0.0 * x}
        send(site, run, {**later, "phase/forward_s": 0.09 + 0.0 * x}, x, seq=seq)
        page.wait(
            "n => Number(document.querySelector('#run-charts [data-name=\"loss\"] .plot').dataset.lastStep) >= n",
            argument=start + 99,
        )
    page.wait("() => document.querySelector('#run-charts [data-name=\"loss\"] .plot')._fullLayout.yaxis.range[1] < 1.3")
    assert look(page, "loss", "plot => plot._fullLayout.yaxis.range[0]") > 0.8
    assert shown(page, "loss", ".flag") == ""
    page.wait("() => document.querySelector('#run-charts [data-name=step] .shares').textContent.includes('90 %')")
    assert shown(page, "step", ".now") == "100"  # milliseconds


def test_a_zoom_that_fails_is_told_over_the_chart(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 101)
    send(site, run, {"loss": 1.0 / x, "step_time_s": 0.1 + 1e-6 * x, "phase/data_s": 0.1 + 1e-6 * x}, x)
    page = tab(f"/run/{run}")
    page.expected.append("500")
    page.drawn(4)
    page.page.route(
        "**/series?*", lambda route: route.fulfill(status=500, json={"error": {"message": "the disk is full"}})
    )
    page.page.keyboard.press("+")
    for name in ("loss", "step"):
        page.wait('name => !document.querySelector(`#run-charts [data-name="${name}"] .empty`).hidden', argument=name)
        assert shown(page, name, ".empty") == "Not loaded: the disk is full"
        assert float(look(page, name, "plot => getComputedStyle(plot).opacity")) < 0.5
    page.page.unroute("**/series?*")
    page.page.keyboard.press("0")
    for name in ("loss", "step"):
        page.wait('name => document.querySelector(`#run-charts [data-name="${name}"] .empty`).hidden', argument=name)
        assert float(look(page, name, "plot => getComputedStyle(plot).opacity")) == 1


def test_a_zoom_while_samples_are_on_their_way_reaches_where_a_step_goes(
    site: ServerProcess, tab: OpenTab, run: str
) -> None:
    x = np.arange(1, 101)
    shares = np.where(x <= 50, 0.02, 0.08)
    send(
        site,
        run,
        {"loss": 1.0 / x, "step_time_s": 0.1 + 0.0 * x, "phase/data_s": shares, "phase/forward_s": 0.1 - shares},
        x,
    )
    page = tab(f"/run/{run}")
    page.drawn(5)
    page.live()
    page.page.evaluate(BELOW_THE_FOLD)
    part = "document.querySelector('#run-charts [data-name=\"phase/data_s\"]').chartPart"
    page.wait(f"() => !{part}.visible && !{part}.loading")
    held: list[Route] = []
    page.page.route("**/series?*from=*", lambda route: held.append(route))
    page.page.keyboard.press("+")
    page.wait(f"() => {part}.loading")
    page.page.unroute("**/series?*from=*")
    page.page.keyboard.press("ArrowRight")  # steps 38 to 87 now, and nothing has come of those before
    for route in held:
        with contextlib.suppress(Error):  # given up by the page
            route.continue_()
    page.wait("() => document.querySelector('#run-charts [data-name=step] .shares').textContent.includes('64 %')")


# --- one step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1])
def test_a_run_of_one_step_has_whole_steps_and_a_dot(site: ServerProcess, tab: OpenTab, run: str, step: int) -> None:
    send(site, run, {"loss": [2.5]}, np.array([step]))
    page = tab(f"/run/{run}")
    loaded(page, "loss")
    page.live()
    span = [step - 0.5, step + 0.5]
    range_of = "document.querySelector('#run-charts [data-name=\"loss\"] .plot')._fullLayout.xaxis.range"
    page.wait(f"span => String({range_of}) === String(span)", argument=span)
    assert look(page, "loss", X_LABELS) == [str(step)]
    assert look(page, "loss", f"plot => plot.data[{POINTS}].y") == [2.5]
    x = np.arange(step + 1, step + 60)
    send(site, run, {"loss": 2.5 + x}, x, seq=2)
    page.wait(
        "n => Number(document.querySelector('#run-charts [data-name=\"loss\"] .plot').dataset.lastStep) >= n",
        argument=step + 59,
    )
    assert len(look(page, "loss", X_LABELS)) < 9


def test_samples_of_one_step_are_one_point_and_a_line_over_time(site: ServerProcess, tab: OpenTab, run: str) -> None:
    name = "host/memory_used_bytes"
    for seq, gib in enumerate((8, 8.5, 9.5, 10), 1):
        send(site, run, {name: np.array([2.0**30 * gib])}, np.array([0]), seq=seq)
        time.sleep(0.6)
    page = tab(f"/run/{run}")
    loaded(page, name)
    one = f"const one = plot.data[{POINTS}];"
    points = look(page, name, f"plot => {{ {one} return [one.x, one.y, one.error_y.array, one.error_y.arrayminus] }}")
    assert points == [[0], pytest.approx([9]), pytest.approx([1]), pytest.approx([1])]
    assert look(page, name, X_LABELS) == ["0"]
    point_at(page, name, 0)
    assert shown(page, name, ".now") == "9 8 … 10"
    page.page.locator("[data-value=relative]").click()
    page.wait(f"() => document.querySelector('#run-charts [data-name=\"{name}\"] .plot').data[{MEAN}].x.length === 4")
    edges = look(
        page, name, f"plot => [plot._fullLayout.xaxis.range, plot.data[{MEAN}].x].flatMap((x) => [x[0], x.at(-1)])"
    )
    assert edges[3] - edges[2] >= 1.8
    assert edges[:2] == pytest.approx([edges[2] - 0.5, edges[3] + 0.5], abs=0.05)


# --- the number in the caption ----------------------------------------------------------------------------------------


def test_the_caption_is_the_newest_value_and_not_the_mean_of_the_last_bucket(
    site: ServerProcess, tab: OpenTab, run: str
) -> None:
    x = np.arange(1, 20_001)
    send(site, run, {"loss": 1.0 * x}, x)
    page = tab(f"/run/{run}")
    page.drawn(1)
    page.wait("() => document.querySelector('#run-charts [data-name=\"loss\"] .now').textContent")
    assert look(page, "loss", f"plot => plot.data[{MEAN}].y.at(-1)") < 19_995
    page.wait("() => document.querySelector('[data-figure=loss] .value').textContent === '20.0k'")
    page.wait("() => document.querySelector('#run-charts [data-name=\"loss\"] .now').textContent === '20.0k'")
    zoomed = tab(f"/run/{run}?x=100-110")
    zoomed.drawn(1)
    zoomed.wait("() => document.querySelector('#run-charts [data-name=\"loss\"] .now').textContent === '20.0k'")


def test_infinity_is_red_and_called_so(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 11)
    send(site, run, {"loss": np.where(x == 5, nan, 1.0 * x)}, x)
    page = tab(f"/run/{run}")
    page.drawn(1)
    page.live()
    send(site, run, {"loss": np.array([math.inf])}, np.array([11]), seq=2)
    page.wait("() => /^(Inf|NaN)$/.test(document.querySelector('#run-charts [data-name=\"loss\"] .now').textContent)")
    caption = page.page.locator('#run-charts [data-name="loss"] .now')
    assert "bad" in (caption.get_attribute("class") or "").split()
    look(page, "loss", "plot => { plot.closest('.card').chartPart.latest = -Infinity }")  # as a server may tell it
    page.wait("() => document.querySelector('#run-charts [data-name=\"loss\"] .now').textContent === '−Inf'")
    assert "bad" in (caption.get_attribute("class") or "").split()
    point_at(page, "loss", 5)
    page.wait("() => document.querySelector('#run-charts [data-name=\"loss\"] .now').textContent === 'NaN or Inf'")
    assert "bad" in (caption.get_attribute("class") or "").split()


def test_before_its_first_sample_a_series_has_no_value(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 101)
    send(site, run, {"loss": 1.0 * x}, x)
    send(site, run, {"late": 1e-6 * x[50:] + 7}, x[50:], seq=2)
    page = tab(f"/run/{run}")
    page.drawn(2)
    point_at(page, "loss", 20)
    page.wait("() => document.querySelector('#run-charts [data-name=\"late\"] .now').textContent === 'n/a'")
    assert shown(page, "loss", ".now") == "20"


def test_values_of_charts_are_no_live_regions(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 31)
    send(site, run, {"loss": 1.0 / x, "step_time_s": 0.1 + 1e-6 * x, "phase/data_s": 0.1 + 1e-6 * x}, x)
    page = tab(f"/run/{run}")
    page.drawn(4)
    assert page.page.locator(".chart :is(output, [role=status], [role=alert], [role=log], [aria-live])").count() == 0


# --- the vertical axis ------------------------------------------------------------------------------------------------


def test_a_logarithmic_axis_has_labels_for_constants_and_words_where_nothing_is_positive(
    site: ServerProcess, tab: OpenTab, run: str
) -> None:
    x = np.arange(1, 51)
    drawable = {"three": 3 + 1e-6 * x, "big": 65_536 + 1e-3 * x, "huge": 1e12 + 1e9 * x, "ints": x / 5}
    values = {**drawable, "negative": -1.0 * x, "zero": -1e-6 * x}
    send(site, run, values, x)
    page = tab(f"/run/{run}?log=1")
    page.drawn(6)
    for name in drawable:
        labels = look(page, name, Y_LABELS)
        assert 2 <= len(labels) <= 8, (name, labels)
        assert page.page.locator(f'#run-charts [data-name="{name}"] .empty').is_hidden()
    for name in ("negative", "zero"):
        assert look(page, name, Y_LABELS) == []
        assert shown(page, name, ".empty") == "No positive value for a logarithmic axis"
    page.page.locator("[data-value=log]").click()
    page.wait("() => document.querySelector('#run-charts [data-name=\"negative\"] .empty').hidden")
    assert len(look(page, "negative", Y_LABELS)) >= 2


def test_no_label_of_the_vertical_axis_is_cut_off(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 51)
    share = x / 50
    values = {
        "nearly": 1_000_000 + share, "precise": 100 + 1e-5 * share, "giant": -1e12 - 1e4 * share, "tiny": -1e-10 - 1e-13 * share,
        "plain": 40 * share, "thousands": 12_345 + 3 * share, "nil": -3e-9 * share,
    }  # fmt: skip
    send(site, run, values, x)
    page = tab(f"/run/{run}")
    page.drawn(len(values))
    for name in values:
        labels = look(page, name, Y_LABELS)
        assert look(page, name, CUT_OFF) == 0, labels
        assert len(set(labels)) == len(labels) >= 2
    assert "1,000,000.5" in look(page, "nearly", Y_LABELS)
