"""Charts whose window moves on, and whose request fails."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from recorded import send

if TYPE_CHECKING:
    from builders import ServerProcess
    from conftest import OpenTab, Tab

pytestmark = [pytest.mark.browser, pytest.mark.long]

nan = math.nan
CARD = '#run-charts [data-name="{}"]'
LOSS = "document.querySelector('#run-charts [data-name=\"loss\"] .plot')"
LAST = f"n => Number({LOSS}.dataset.lastStep) >= n"


def look(page: Tab, name: str, expression: str) -> Any:
    """What a JavaScript function of a chart's plot answers."""
    return page.page.locator(f"{CARD.format(name)} .plot").evaluate(expression)


def shown(page: Tab, name: str, part: str) -> str:
    return page.page.locator(f"{CARD.format(name)} {part}").inner_text()


def test_a_window_that_moves_on_is_scaled_by_what_it_shows(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 151)
    times = {"step_time_s": 1.0 + 0.0 * x, "phase/data_s": 0.9 + 0.0 * x, "phase/forward_s": 0.1 + 0.0 * x}
    send(site, run, {"loss": np.where(x == 140, nan, 100.0 - x / 10), **times}, x)
    page = tab(f"/run/{run}?x=last100")
    page.drawn(1)
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
    page.page.get_by_role("tab", name="Time").click()
    page.wait("() => document.querySelector('#run-tab [data-name=step] .shares')?.textContent.includes('90 %')")
    assert page.page.locator("#run-tab [data-name=step] .now").inner_text() == "100"  # milliseconds


def test_a_zoom_that_fails_is_told_over_the_chart(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 101)
    send(site, run, {"loss": 1.0 / x, "step_time_s": 0.1 + 1e-6 * x, "phase/data_s": 0.1 + 1e-6 * x}, x)
    page = tab(f"/run/{run}")
    page.expected.append("500")
    page.drawn(1)
    failed = {"error": {"message": "the disk is full"}}
    page.page.route("**/series?*", lambda route: route.fulfill(status=500, json=failed))
    for key, hidden in (("+", False), ("0", True)):
        page.page.keyboard.press(key)
        empty = f"document.querySelector('{CARD.format('loss')} .empty')"
        page.wait(f"hidden => {empty}.hidden === hidden", argument=hidden)
        assert hidden or shown(page, "loss", ".empty") == "Not loaded: the disk is full"
        assert (float(look(page, "loss", "plot => getComputedStyle(plot).opacity")) == 1) is hidden
        page.page.unroute("**/series?*")
