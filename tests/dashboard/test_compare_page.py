"""Runs beside each other: what is said first, the intervals, the settings, the charts over each other, and the picker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
from builders import ServerProcess, server_process
from recorded import send

from perfagent.wire import Event

if TYPE_CHECKING:
    from conftest import OpenTab

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Three runs of known difference: `after` waits less for data, `third` learns at another rate."""
    with server_process(tmp_path_factory.mktemp("compare")) as server:
        for at, (name, wait, workers, lr) in enumerate(
            (("before", 0.12, 0, 1e-3), ("after", 0.01, 8, 1e-3), ("third", 0.11, 2, 1e-4))
        ):
            step = np.arange(1, 301)
            times = (0.12 + wait) * np.exp(np.random.default_rng(at).normal(0, 0.04, 300))
            values = {
                "loss": 1 + 3 / step + lr, "step_time_s": times, "samples_per_s": 32 / times,
                "phase/data_s": wait + 0.0 * step, "process/rss_bytes": 2.0**30 + 0.0 * step,
            }  # fmt: skip
            config = {"workers": workers, "lr": lr, "evil": f"<img src=x onerror={at}>"}
            begins = {"state": "starting", "name": name, "config": config}
            events = [Event(kind="state", time=time.time() - 600, step=0, data=begins)]
            send(server, f"id-{at}", values, step, events=events)
        yield server


def test_the_first_sentence_says_how_much_faster_and_why(pair: ServerProcess, tab: OpenTab) -> None:
    ids = [pair.get("/runs", name=name)["runs"][0]["run"] for name in ("before", "after")]
    page = tab(f"/compare?runs={'&runs='.join(ids)}", server=pair)
    page.wait("() => document.querySelector('.headline')")
    assert page.page.locator(".picker .mantine-Pill-label").all_inner_texts() == ["before", "after"]
    said = page.page.locator(".headline").inner_text()
    assert said.startswith("after is 8")
    assert said.endswith("data wait is 110 ms a step shorter.")
    assert page.page.locator(".whisker i.faster").count() == 2
    first = page.page.locator("table").first.inner_text()
    assert "130 ms mean 129 ms" in first
    assert "baseline" in first


def test_settings_that_differ_are_searched_and_are_text(pair: ServerProcess, tab: OpenTab) -> None:
    page = tab("/compare?runs=before,after,third", server=pair, width=390)
    settings = page.page.locator("#compare-settings")
    settings.wait_for()
    assert page.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), "on a phone"
    assert "<img src=x onerror=1>" in settings.inner_text()
    assert page.page.locator("#compare-settings img").count() == 0
    page.page.locator("#compare-search").fill("work")
    page.wait("() => document.querySelectorAll('#compare-settings tbody tr').length === 1")
    assert "8" in settings.inner_text()
    page.page.locator("#compare-search").fill("nowhere")
    page.wait("() => document.querySelector('#compare-settings').textContent.includes('Nothing fits')")


def test_charts_of_runs_share_axes_legend_and_cursor(pair: ServerProcess, tab: OpenTab) -> None:
    page = tab("/compare?runs=before,after,third", server=pair)
    loss = '.board [data-name="loss"]'
    page.page.locator(loss).scroll_into_view_if_needed()
    page.wait(f"() => document.querySelector('{loss} .plot')?.data?.filter((line) => line.x?.length > 200).length >= 3")
    legend = page.page.locator(f"{loss} .share").all_inner_texts()
    assert legend == ["before", "after", "third"]
    page.page.locator(f"{loss} .plot").hover()
    page.wait(
        f"() => [...document.querySelectorAll('{loss} .share b')].every((one) => one.textContent.startsWith('1.0'))"
    )
    assert page.page.locator('.board [data-name="ranks"], .board [data-name="step"]').count() == 0


def test_the_picker_adds_a_run_and_takes_one_away_in_the_address(pair: ServerProcess, tab: OpenTab) -> None:
    page = tab("/compare", server=pair)
    page.wait("() => document.body.textContent.includes('Name two runs above')")
    field = page.page.locator("#compare-runs")
    field.fill("before")
    field.press("Enter")
    page.wait("() => location.search === '?runs=before'")
    page.wait("() => document.body.textContent.includes('One run is there')")
    field = page.page.locator("#compare-runs")
    field.fill("before:200-300")
    field.press("Enter")
    page.wait("() => document.querySelector('.headline')?.textContent.includes('No difference in speed')")
    assert "200–300" in page.page.locator("table").first.inner_text()
    page.page.go_back()
    page.wait("() => document.body.textContent.includes('One run is there')")
    field.fill("nowhere")
    field.press("Enter")
    page.wait("() => document.body.textContent.includes(\"there is no run 'nowhere'\")")
