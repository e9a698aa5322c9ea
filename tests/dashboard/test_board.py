"""The board of charts: sections, pins, order, an enlarged chart and its tools, axes, search, and what is saved as a file."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image
from recorded import record_run, send, training

from perfagent.wire import Event

if TYPE_CHECKING:
    from builders import ServerProcess
    from conftest import OpenTab, Tab

pytestmark = pytest.mark.browser

NAMES = "[...document.querySelectorAll('#run-charts [data-section=\"{}\"] .grid > *')].map((card) => card.dataset.name)"
LINES = (
    "document.querySelector('#run-charts [data-name=\"{}\"] .plot').data.filter((line) => line.x?.length > 10).length"
)


def choose(page: Tab, chart: str, item: str) -> None:
    card = page.page.locator(f'#run-charts [data-name="{chart}"]')
    card.locator(".chart-menu summary").click()
    card.get_by_role("menuitem", name=item).click()


def test_charts_stand_in_sections_that_fold_and_stay_so(site: ServerProcess, tab: OpenTab, run: str) -> None:
    steps = np.arange(1, 101)
    mine = {f"reward/{name}": steps * 0.1 for name in ("mean", "best")}
    send(site, run, training(steps) | mine | {"val/loss": 2 + 1 / steps, "constant": 0.0 * steps + 7}, steps)
    page = tab(f"/run/{run}", locale="en-GB")  # a browser that remembers nothing of other tests
    page.drawn(5)
    titles = page.page.locator("#run-charts .section summary h2").all_inner_texts()
    assert titles[0] == "Training"
    assert "reward/" in titles
    assert page.page.evaluate(NAMES.format("training"))[:2] == ["loss", "val/loss"]
    assert page.page.evaluate(NAMES.format("logged:reward")) == ["reward/best", "reward/mean"]
    # a table, not a chart
    page.wait("() => [...document.querySelectorAll('details.same dd')].some((one) => one.textContent === '7')")
    assert page.page.locator('#run-charts [data-name="constant"] .plot').count() == 0
    folded = "document.querySelector('[data-section=\"logged:reward\"]')?.open === false"
    page.page.locator('[data-section="logged:reward"] > summary').click()
    page.wait(f"() => {folded}")
    page.page.reload()
    page.wait(f"() => {folded}")
    field = page.page.locator(".tools input[type=search]")
    field.fill("loss|^lr")
    cards = "[...document.querySelectorAll('#run-charts .chart')].filter((card) => card.checkVisibility())"
    seen = f"JSON.stringify({cards}.map((card) => card.dataset.name).sort())"
    page.wait(f'() => {seen} === \'["loss","lr","val/loss"]\'')
    hint = "text => document.querySelector('#run-charts .hint').textContent.startsWith(text)"
    for searched, said in (("nowhere", "No chart fits this search."), ("(", "This is not a regular expression")):
        field.fill(searched)
        page.wait(hint, argument=said)


@pytest.mark.long
def test_a_pinned_chart_comes_first_and_charts_change_places(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run)
    page = tab(f"/run/{run}", locale="en-GB")
    page.drawn(5)
    choose(page, "lr", "Pin to the top")
    page.wait(f"() => ({NAMES.format('pinned')})[0] === 'lr'")
    page.page.reload()
    page.wait(f"() => ({NAMES.format('pinned')})[0] === 'lr'")
    choose(page, "lr", "Unpin")
    page.wait(f"() => ({NAMES.format('training')}).includes('lr')")
    before = page.page.evaluate(NAMES.format("training"))
    choose(page, before[1], "Move to the left")
    page.wait(f"() => ({NAMES.format('training')})[0] === '{before[1]}'")
    first, second = (page.page.locator(f'#run-charts [data-name="{name}"]') for name in before[:2])
    first.locator("h2").drag_to(second)
    page.wait(f"() => ({NAMES.format('training')})[0] === '{before[0]}'")


def test_enlarged_chart_has_a_range_and_takes_metrics_and_ranks(site: ServerProcess, tab: OpenTab, run: str) -> None:
    steps = np.arange(1, 201)
    for rank in range(2):
        begins = Event(kind="state", time=time.time(), step=0, data={"state": "starting", "world_size": 2})
        send(site, run, training(steps, seed=rank), steps, rank=rank, events=[begins])
    page = tab(f"/run/{run}")
    page.drawn(5)
    choose(page, "loss", "Enlarge")
    card = page.page.locator('#run-charts [data-name="loss"].enlarged')
    card.get_by_label("y from").fill("1")
    card.get_by_label("y to").fill("3")
    card.get_by_label("y to").press("Enter")
    shown = "document.querySelector('#run-charts [data-name=\"loss\"] .plot').layout.yaxis.range"
    page.wait(f"() => JSON.stringify({shown}) === '[1,3]'")
    before = page.page.evaluate(LINES.format("loss"))
    card.get_by_label("Add a metric").select_option("lr")
    page.wait(f"() => {LINES.format('loss')} === {before + 1}")
    card.get_by_label("Add a rank").select_option("1")
    page.wait(f"() => {LINES.format('loss')} === {before + 2}")
    assert card.locator(".share").all_inner_texts() == ["Loss", "lr", "rank 1"]
    card.get_by_role("button", name="Remove added lines").click()
    page.wait(f"() => {LINES.format('loss')} === {before}")
    page.wait("() => location.search.includes('chart=loss')")
    card.get_by_role("button", name="Back to its size").focus()
    page.page.keyboard.press("Escape")
    page.wait("() => !document.querySelector('.enlarged')")


@pytest.mark.long
def test_any_metric_is_the_x_axis_and_both_axes_logarithmic(site: ServerProcess, tab: OpenTab, run: str) -> None:
    steps = np.arange(1, 201)
    send(site, run, training(steps) | {"epoch": steps / 50}, steps)
    page = tab(f"/run/{run}")
    page.drawn(5)
    choose(page, "epoch", "Use as horizontal axis")
    reach = "document.querySelector('#run-charts [data-name=\"loss\"] .plot').layout.xaxis.range[1]"
    page.wait(f"() => {reach} > 3.9 && {reach} < 4.2")
    page.wait("() => location.search.includes('axis=epoch')")
    page.page.get_by_role("button", name="Step", exact=True).click()
    page.page.get_by_role("button", name="Log x").click()
    axis = "document.querySelector('#run-charts [data-name=\"loss\"] .plot').layout.xaxis"
    page.wait(f"() => {axis}.type === 'log' && {axis}.range[0] === 0")
    assert page.page.evaluate(f"{axis}.ticktext")[0] == "1"
    choose(page, "loss", "Log y")
    types = "['loss', 'lr'].map((name) => document.querySelector(`#run-charts [data-name=\"${name}\"] .plot`).layout.yaxis.type)"
    page.wait(f'() => JSON.stringify({types}) === \'["log","linear"]\'')


def test_a_chart_is_saved_as_csv_and_as_png(site: ServerProcess, tab: OpenTab, run: str, tmp_path: Path) -> None:
    record_run(site, run, steps=50)
    page = tab(f"/run/{run}")
    page.drawn(5)
    with page.page.expect_download() as saved:
        choose(page, "loss", "Save as CSV")
    saved.value.save_as(tmp_path / "loss.csv")
    rows = list(csv.DictReader((tmp_path / "loss.csv").read_text().splitlines()))
    stored = site.get(f"/runs/{run}/series", name="loss", points=100)
    assert [float(row["mean"]) for row in rows] == stored["mean"]
    with page.page.expect_download() as saved:
        choose(page, "loss", "Save as PNG")
    saved.value.save_as(tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.size == (2000, 1000)
        assert picture.convert("RGBA").getpixel((2, 2)) == (255, 255, 255, 255), "no background"
