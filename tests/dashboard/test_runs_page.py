"""The table of runs: sorted and filtered by the server, live, in the address, and what is done with several at once."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
from builders import ServerProcess, server_process, until
from recorded import log, record_run, send

from perfagent.wire import Event

if TYPE_CHECKING:
    from conftest import OpenTab, Tab

pytestmark = pytest.mark.browser

NAMES = """() => [...document.querySelectorAll('.ag-center-cols-container .ag-row')]
  .sort((a, b) => a.getAttribute('row-index') - b.getAttribute('row-index'))
  .map((row) => row.querySelector('.name')?.textContent)"""


def cell(run: str, column: str) -> str:
    return f'.ag-row[row-id="{run}"] [col-id="{column}"]'


def shows(run: str, column: str, text: str) -> str:
    return f"() => document.querySelector('{cell(run, column)}')?.textContent.includes('{text}')"


def data_requests(page: Tab) -> list[str]:
    """Of the page; the bar asks for itself who is logged in."""
    asked = [one for one in page.requests if one.startswith(("/api/v1", "/_dash-update-component"))]
    return [one for one in asked if one != "/api/v1/session"]


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """150 runs: one whose loss is NaN and one that failed are among the oldest."""
    x = np.arange(1, 3)
    with server_process(tmp_path_factory.mktemp("crowded")) as server:
        log(server, "sick", 1, project="attic", loss=1.0)
        log(server, "sick", 2, project="attic", loss=math.nan)
        failed = Event(kind="state", time=time.time(), step=2, data={"state": "failed", "reason": "test"})
        send(server, "ancient-failed", {"loss": 1.0 / x}, x, project="attic", events=[failed])
        for i in range(150):
            send(server, f"new-{i:03d}", {"loss": 1.0 / x + i}, x, project="new")

        def alerted() -> set[str]:
            return {alert["run_name"] for alert in server.get("/alerts", state="firing")["alerts"]}

        until(lambda: {"sick", "ancient-failed"} <= alerted(), why="the two have no alerts")
        yield server


def test_first_screen_asks_three_times_and_has_sick_runs_on_top(crowded: ServerProcess, tab: OpenTab) -> None:
    for _ in range(3):  # it asks once more where the server takes 2 s to say that it listens
        page = tab("/runs", server=crowded, height=900)
        page.wait("() => document.querySelector('.ag-row .name')")
        asked = data_requests(page)
        page.wait(f'() => JSON.stringify(({NAMES})().slice(0, 2).sort()) === \'["ancient-failed","sick"]\'')
        assert page.page.locator("#runs-summary").inner_text().startswith("152 runs, ")
        if len(asked) <= 3:
            break
    assert len(asked) <= 3, asked


def test_search_chips_and_sorting_reach_all_runs_and_the_address(crowded: ServerProcess, tab: OpenTab) -> None:
    page = tab("/runs", server=crowded, height=900)
    page.wait("() => document.querySelector('.ag-row .name')")
    search = page.page.locator("#runs-search")
    search.fill("/^new-00[12]$/")
    page.wait(f'() => JSON.stringify(({NAMES})().sort()) === \'["new-001","new-002"]\'')
    search.fill("NaN attic")
    page.wait(f"() => JSON.stringify(({NAMES})()) === '[\"sick\"]'")
    page.wait("() => location.search.includes('q=NaN')")
    search.fill("")
    page.page.locator(".chip.failed").click()
    page.wait(f"() => JSON.stringify(({NAMES})()) === '[\"ancient-failed\"]'")
    reopened = tab(page.page.url.removeprefix(crowded.url), server=crowded)
    reopened.wait(f"() => JSON.stringify(({NAMES})()) === '[\"ancient-failed\"]'")
    assert reopened.page.locator(".chip.failed").get_attribute("aria-pressed") == "true"
    page.page.locator(".chip.all").click()
    page.wait(f"() => ({NAMES})().length > 1 && !location.search.includes('failed')")
    page.page.locator('.ag-header-cell[col-id="name"]').click()
    page.wait(f"() => ({NAMES})()[0] === 'ancient-failed' && ({NAMES})()[1] === 'new-000'")
    page.wait("() => location.search.includes('sort=name')")
    search.fill("nobody-has-this-name")
    page.wait("() => document.querySelector('.runs-grid')?.textContent.includes('No run matches this filter.')")
    search.fill("/(/")
    page.wait("() => document.querySelector('#runs-chips')?.textContent.includes('no regular expression')")


def test_back_from_a_run_leads_to_the_same_rows(crowded: ServerProcess, tab: OpenTab) -> None:
    page = tab("/runs?sort=name&order=asc", server=crowded, height=900)
    page.wait(f"() => ({NAMES})()[0] === 'ancient-failed'")
    page.page.locator(".ag-body-viewport").evaluate("view => (view.scrollTop = 2000)")
    page.wait(f"() => !({NAMES})().includes('new-000') && sessionStorage.getItem('perfagent-runs-row') > 20")
    run = page.page.locator(".ag-row .name").nth(12)
    name = run.inner_text()
    run.click()
    page.wait("name => document.title.startsWith(name) && document.querySelector('.verdict')", argument=name)
    page.page.go_back()
    page.wait(f"name => ({NAMES})().includes(name)", argument=name)


def test_values_and_verdict_of_a_row_move_with_the_run(site: ServerProcess, tab: OpenTab) -> None:
    name = f"moves-{uuid.uuid4().hex[:6]}"
    record_run(site, name, steps=50)
    page = tab(f"/runs?q={name}")
    page.live()
    page.wait(shows(name, "step", "50"))
    log(site, name, 51, loss=7.25, step_time_s=0.1)
    page.wait(shows(name, "loss", "7.25"))
    page.wait(shows(name, "step", "51"))
    log(site, name, 52, loss=math.nan)
    page.wait(shows(name, "verdict", "NaN"))
    site.admin("DELETE", f"/runs/{name}")
    page.expected.append("404")
    page.wait(f"() => !document.querySelector('.ag-row[row-id=\"{name}\"]')")


@pytest.mark.long
def test_metrics_and_settings_are_columns(site: ServerProcess, tab: OpenTab) -> None:
    name = f"wide-{uuid.uuid4().hex[:6]}"
    config = {"optimizer": {"lr": 0.003}}
    begun = Event(kind="state", time=time.time(), step=0, data={"state": "running", "config": config})
    x = np.arange(1, 4)
    send(site, name, {"loss": 1.0 / x, "val/acc": 0.5 + 0.0 * x}, x, events=[begun])
    page = tab(f"/runs?q={name}&columns=val/acc,config:optimizer.lr")
    page.wait(shows(name, "column:val/acc", "0.5"))
    page.wait(shows(name, "column:config:optimizer.lr", "0.003"))


def test_several_runs_are_tagged_and_that_is_undone(site: ServerProcess, tab: OpenTab) -> None:
    group = uuid.uuid4().hex[:6]
    for place in range(2):
        record_run(site, f"pick-{group}-{place}", steps=3)
    page = tab(f"/runs?q=pick-{group}")
    for place in range(2):
        page.page.locator(f'.ag-row[row-id="pick-{group}-{place}"] input').click()
    page.wait("() => document.querySelector('.picked')?.textContent.includes('2 picked')")
    page.page.locator(".picked input").fill("keep")
    page.page.get_by_role("button", name="Add tag").click()
    page.wait(shows(f"pick-{group}-0", "name", "keep"))
    until(lambda: site.get(f"/runs/pick-{group}-1")["tags"] == ["keep"])
    page.page.get_by_role("button", name="Undo").click()
    until(lambda: site.get(f"/runs/pick-{group}-1")["tags"] == [])


def test_a_phone_shows_name_and_verdict_below_each_other(site: ServerProcess, tab: OpenTab) -> None:
    name = f"phone-{uuid.uuid4().hex[:6]}"
    log(site, name, 1, loss=math.nan)
    page = tab(f"/runs?q={name}", width=390, height=844, is_mobile=True, has_touch=True)
    page.wait("() => document.querySelector('.cell-run .cell-verdict')?.textContent.includes('NaN')")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_view_is_saved_replaced_opened_and_deleted(crowded: ServerProcess, tab: OpenTab) -> None:
    page = tab("/runs?q=attic", server=crowded, height=900)
    menu = page.page.locator(".views")

    def save() -> None:
        menu.get_by_label("Name of the view").fill("the attic")
        menu.get_by_role("button", name="Save this view").click()

    menu.locator("summary").click()
    save()
    menu.get_by_text("the attic is saved.").wait_for()
    save()
    page.expected.append("409")
    menu.get_by_role("button", name="Replace it").click()
    menu.get_by_text("the attic is saved.").wait_for()
    link = menu.locator("a").get_attribute("href")
    assert link == "/views/the%20attic"
    other = tab(link, server=crowded, height=900)
    other.wait(f'() => JSON.stringify(({NAMES})().sort()) === \'["ancient-failed","sick"]\'')
    assert other.page.url.endswith("/runs?q=attic")
    drop = menu.get_by_label("Delete the view the attic")
    drop.click()
    assert drop.inner_text() == "Delete?"
    drop.click()
    menu.get_by_text("the attic is deleted.").wait_for()
    assert crowded.get("/views")["views"] == []
