"""Charts of unusual data: gaps, single steps, windows that move on, requests that fail. What is drawn is what was
measured."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from recorded import log, send

if TYPE_CHECKING:
    from builders import ServerProcess
    from conftest import OpenTab, Tab

pytestmark = [pytest.mark.browser, pytest.mark.long]

nan = math.nan
MEAN, POINTS = 3, 6  # traces of a chart
CARD = '#run-charts [data-name="{}"]'
LOSS = "document.querySelector('#run-charts [data-name=\"loss\"] .plot')"
LAST = f"n => Number({LOSS}.dataset.lastStep) >= n"
CAPTION = "text => document.querySelector('#run-charts [data-name=\"loss\"] .now')?.textContent === text"
Y_LABELS = "plot => [...plot.querySelectorAll('.ytick text')].map((label) => label.textContent)"


def look(page: Tab, name: str, expression: str) -> Any:
    """What a JavaScript function of a chart's plot answers."""
    return page.page.locator(f"{CARD.format(name)} .plot").evaluate(expression)


def shown(page: Tab, name: str, part: str) -> str:
    return page.page.locator(f"{CARD.format(name)} {part}").inner_text()


def test_live_samples_go_on_behind_gaps_and_dots_become_lines(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 51)
    send(site, run, {"loss": 2.0 + 0.0 * x}, x)
    page = tab(f"/run/{run}")
    page.drawn(1)
    page.live()
    log(site, run, 51, loss=nan)
    log(site, run, 52, loss=1.5)
    page.wait(f"() => {LOSS}.data[{POINTS}].x.join() === '52'")
    log(site, run, 53, loss=1.4)
    page.wait(f"() => {LOSS}.data[{MEAN}].x.at(-1) === 53 && {LOSS}.data[{POINTS}].x.length === 0")
    assert page.page.evaluate(f"{LOSS}.data[{MEAN}].y[50]") is None


def test_a_window_that_moves_on_is_scaled_by_what_it_shows(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 151)
    times = {"step_time_s": 1.0 + 0.0 * x, "phase/data_s": 0.9 + 0.0 * x, "phase/forward_s": 0.1 + 0.0 * x}
    send(site, run, {"loss": np.where(x == 140, nan, 100.0 - x / 10), **times}, x)
    page = tab(f"/run/{run}?x=last100")
    page.drawn(3)
    page.live()
    assert shown(page, "loss", ".flag") == "1 NaN or Inf in view"
    for seq, start in enumerate((151, 251), 2):
        x = np.arange(start, start + 100)
        times = {"step_time_s": 0.1 + 0.0 * x, "phase/data_s": 0.01 + 0.0 * x, "phase/forward_s": 0.09 + 0.0 * x}
        send(site, run, {"loss": 1 + 0.1 * np.sin(x / 9), **times}, x, seq=seq)
        page.wait(LAST, argument=start + 99)
    page.wait(f"() => {LOSS}._fullLayout.yaxis.range[1] < 1.3")
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
    failed = {"error": {"message": "the disk is full"}}
    page.page.route("**/series?*", lambda route: route.fulfill(status=500, json=failed))
    for key, hidden in (("+", False), ("0", True)):
        page.page.keyboard.press(key)
        for name in ("loss", "step"):
            empty = f"document.querySelector('{CARD.format(name)} .empty')"
            page.wait(f"hidden => {empty}.hidden === hidden", argument=hidden)
            assert hidden or shown(page, name, ".empty") == "Not loaded: the disk is full"
            assert (float(look(page, name, "plot => getComputedStyle(plot).opacity")) == 1) is hidden
        page.page.unroute("**/series?*")


def test_caption_is_the_newest_value_not_that_of_the_last_bucket(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 20_001)
    send(site, run, {"loss": 1.0 * x}, x)
    page = tab(f"/run/{run}")
    page.drawn(1)
    page.wait("() => document.querySelector('[data-figure=loss] .value').textContent === '20.0k'")
    page.wait(CAPTION, argument="20.0k")
    assert look(page, "loss", f"plot => plot.data[{MEAN}].y.at(-1)") < 19_995
    zoomed = tab(f"/run/{run}?x=100-110")
    zoomed.drawn(1)
    zoomed.wait(CAPTION, argument="20.0k")


def test_infinity_is_red_and_called_so(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 11)
    send(site, run, {"loss": np.where(x == 5, nan, 1.0 * x)}, x)
    send(site, run, {"late": 1.0 * x[5:]}, x[5:], seq=2)
    page = tab(f"/run/{run}")
    page.drawn(2)
    page.live()
    send(site, run, {"loss": np.array([math.inf])}, np.array([11]), seq=3)
    page.wait("() => /^(Inf|NaN)$/.test(document.querySelector('#run-charts [data-name=\"loss\"] .now').textContent)")
    caption = page.page.locator(f"{CARD.format('loss')} .now")
    assert "bad" in (caption.get_attribute("class") or "").split()
    at = "const axis = plot._fullLayout.xaxis; return plot.getBoundingClientRect().left + axis._offset + axis.l2p(5)"
    box = page.page.locator(f"{CARD.format('loss')} .plot").bounding_box()
    assert box is not None
    page.page.mouse.move(look(page, "loss", f"plot => {{ {at} }}"), box["y"] + 60)
    page.wait(CAPTION, argument="NaN or Inf")
    assert "bad" in (caption.get_attribute("class") or "").split()
    assert shown(page, "late", ".now") == "n/a"  # before its first sample


def test_logarithmic_axis_has_labels_where_values_are_positive(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 51)
    drawable = {"three": 3 + 1e-6 * x, "big": 65_536 + 1e-3 * x, "huge": 1e12 + 1e9 * x, "ints": x / 5}
    send(site, run, {**drawable, "negative": -1.0 * x}, x)
    page = tab(f"/run/{run}?log=1")
    page.drawn(5)
    for name in drawable:
        assert 2 <= len(look(page, name, Y_LABELS)) <= 8, name
        assert page.page.locator(f"{CARD.format(name)} .empty").is_hidden()
    assert look(page, "negative", Y_LABELS) == []
    assert shown(page, "negative", ".empty") == "No positive value for a logarithmic axis"
    page.page.locator("[data-value=log]").click()
    page.wait("() => document.querySelector('#run-charts [data-name=\"negative\"] .empty').hidden")
    for name in drawable:
        labels = look(page, name, Y_LABELS)
        assert len(set(labels)) == len(labels) >= 2, "long labels are told apart"
        left = (
            "plot => Math.min(...[...plot.querySelectorAll('.ytick text')].map((l) => l.getBoundingClientRect().left))"
        )
        assert look(page, name, left) >= look(page, name, "plot => plot.getBoundingClientRect().left"), (
            "and not cut off"
        )
