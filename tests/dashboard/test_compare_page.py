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


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Three seeds each of two rates; 1e-3 ends at 0.7 to 0.9, 1e-1 at 0.1 to 0.3."""
    step = np.arange(1, 41)
    with server_process(tmp_path_factory.mktemp("sweep")) as server:
        for seed in range(3):
            for rate, level in ((0.1, 0.1), (1e-3, 0.7)):
                values = {"loss": 1 / step, "val/acc": (level + 0.1 * seed) * step / 40}
                said = Event(
                    kind="state",
                    time=time.time(),
                    step=0,
                    data={"state": "running", "config": {"lr": rate, "seed": seed}},
                )
                send(server, f"lr={rate:g}-{seed}", values, step, events=[said])
        yield server


def test_groups_lead_from_the_runs_to_lines_with_bands(sweep: ServerProcess, tab: OpenTab) -> None:
    page = tab("/runs", server=sweep, height=1400)
    page.page.locator("#by").click()
    page.page.get_by_role("option", name="config.lr").click()
    page.page.locator(".groups tbody tr").first.wait_for()
    rows = page.page.locator(".groups tbody tr").all_inner_texts()
    assert "by=config.lr" in page.page.url
    assert rows[0].split("\t")[0] == "0.001"
    assert "0.800 ± 0.100" in rows[0]
    assert "★ best lr=0.001-2" in rows[0]
    for search, shown in (("config.seed != 2", "0.750 ± 0.0707"), ("", "0.800 ± 0.100")):
        page.page.locator("#runs-search").fill(search)
        page.page.locator(".groups tbody tr", has_text=shown).wait_for()
    page.page.get_by_role("link", name="Compare these groups").click()
    page.page.locator(".headline", has_text="Best: lr 0.001").wait_for()
    chart = '.board [data-name="val/acc"]'
    page.wait(
        f"() => document.querySelector('{chart} .plot')?.data?.filter((one) => one.fill && one.x?.length).length === 2"
    )
    assert page.page.locator(f"{chart} .share").all_inner_texts() == ["lr 0.001", "lr 0.1"]
    last = "(line) => line.mode === 'lines' && line.y?.length === 40 && Math.abs(line.y.at(-1) - 0.8) < 1e-9"
    assert page.page.evaluate(f"() => document.querySelector('{chart} .plot').data.some({last})"), (
        "the mean of three seeds"
    )
    colors = page.page.evaluate(
        f"""() => [document.querySelector('{chart} .plot').data.findLast((one) => one.mode === 'lines').line.color,
        getComputedStyle(document.documentElement).getPropertyValue('--series-1')]"""
    )
    assert colors[0] == colors[1], "one color in lines, legend, table and parallel coordinates"
    assert page.page.locator(".parallel .line").count() == 6
    page.page.get_by_role("link", name="0.1", exact=True).click()
    page.wait("() => document.querySelectorAll('.ag-center-cols-container .ag-row').length === 3")
    assert page.page.locator("#runs-search").input_value() == "config.lr = 0.1"


def test_a_stretch_of_an_axis_picks_runs(sweep: ServerProcess, tab: OpenTab) -> None:
    page = tab("/compare?by=config.lr", server=sweep)
    page.drawn(1)  # what stands around the axes moves no more
    goal = page.page.locator(".parallel .area").last
    goal.scroll_into_view_if_needed()
    box = goal.bounding_box()
    assert box is not None
    x, top = box["x"] + box["width"] / 2, box["y"]
    page.page.mouse.move(x, top + 2)
    page.page.mouse.down()
    page.page.mouse.move(x, top + 100)
    page.page.mouse.up()
    page.page.get_by_text("3 of 6 runs picked.").wait_for()
    assert page.page.locator(".parallel polyline.faded").count() == 3
    page.page.get_by_role("button", name="lr (log)").click()
    assert page.page.locator(".parallel circle").count() == 2 * page.page.locator(".parallel circle.faded").count() == 6
    assert [row.get_attribute("data-key") for row in page.page.locator("tr.faded").all()] == ["0.1"]
    assert page.page.locator(".parallel > p").inner_text().split("\n")[1:3] == ["★ best", "lr=0.001-2"]
    page.page.mouse.click(x, top + 150)
    page.page.get_by_text("6 runs.").wait_for()
    assert page.page.locator("tr.faded").count() == 0


def test_the_best_run_is_marked_and_the_goal_can_be_turned(sweep: ServerProcess, tab: OpenTab) -> None:
    page = tab("/compare?runs=lr%3D0.1-0,lr%3D0.1-1,lr%3D0.001-0", server=sweep)
    marked = page.page.locator("tr:has(.best) a")
    marked.wait_for()
    assert marked.inner_text() == "lr=0.001-0"
    page.page.locator("#goal").click()
    page.page.get_by_role("option", name="Lowest val/acc").click()
    page.wait("() => document.querySelector('tr:has(.best) a')?.textContent === 'lr=0.1-0'")
    assert "goal=min" in page.page.url
