"""The inbox: who has an alert, what keeps it quiet, and each act with its undo."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import playwright.sync_api as playwright_errors
import pytest
from builders import ServerProcess, server_process, until
from recorded import log, send

from perfagent.wire import Event

if TYPE_CHECKING:
    from conftest import OpenTab, Tab

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("sick")) as server:
        yield server


def nan(server: ServerProcess, run: str) -> None:
    log(server, run, 1, loss=2.0)
    log(server, run, 2, loss=math.nan)


def judged(server: ServerProcess, run: str) -> None:
    """A NaN whose alert is there."""
    nan(server, run)
    until(lambda: any(alert["run_name"] == run for alert in server.get("/alerts", state="firing")["alerts"]))


def view(page: Tab, name: str, count: int) -> None:
    page.page.locator("#alerts-view label", has_text=name).click()
    shown = f"[data-view={name.lower()}]"
    page.wait(
        f"() => document.querySelector('{shown}') && document.querySelectorAll('{shown} .alert.card').length === {count}"
    )


def act(page: Tab, server: ServerProcess, label: str) -> None:
    """Again where news that was on its way has closed the menu."""
    item = page.page.get_by_role("menuitem", name=label, exact=True)
    before = server.get("/alerts")
    for _ in range(5):
        if not item.is_visible():
            page.page.get_by_role("button", name="Quiet").first.click()
        with contextlib.suppress(playwright_errors.TimeoutError):
            item.click(timeout=10_000)
            return
        if server.get("/alerts") != before:
            return
    pytest.fail(f"the menu never held still for {label!r}")


def test_each_act_moves_an_alert_and_its_undo_brings_it_back(server: ServerProcess, tab: OpenTab) -> None:
    page = tab("/alerts", server=server)
    page.wait("() => document.querySelector('#alerts-list')?.textContent === 'Nothing needs you now.'")
    page.live()
    nan(server, "one")
    page.wait("() => document.querySelector('.alert.card')")
    act(page, server, "Snooze 1 hour")
    page.wait("() => !document.querySelector('.alert.card')")
    view(page, "Quiet", 1)
    assert "snoozed until" in page.page.locator(".alert .taken").inner_text()
    page.wait("() => location.search.includes('view=quiet')")
    act(page, server, "End the snooze")
    page.wait("() => !document.querySelector('.alert.card')")
    view(page, "Open", 1)
    act(page, server, "Mute this rule in this run")
    view(page, "Quiet", 1)
    assert "muted until somebody undoes it" in page.page.locator(".alert .taken").inner_text()
    act(page, server, "End the mute")
    view(page, "Open", 1)
    page.page.get_by_role("button", name="Acknowledge").click()
    page.page.get_by_role("dialog").get_by_role("button", name="Acknowledge").click()
    view(page, "Acknowledged", 1)
    assert "local has it" in page.page.locator(".alert .taken").inner_text()
    page.page.get_by_role("button", name="Take back").click()
    view(page, "Open", 1)
    act(page, server, "Resolve")
    view(page, "Resolved", 1)


def test_an_alert_that_fires_while_the_page_is_being_opened_is_shown(server: ServerProcess, tab: OpenTab) -> None:
    page = tab("/alerts", server=server, late_ms=1500)
    page.wait("() => document.querySelector('#alerts-list')?.textContent === 'Nothing needs you now.'")
    judged(server, "one")
    page.wait("() => document.querySelector('.alert.card')")


def test_many_alerts_come_in_parts_with_their_runs_names(tab: OpenTab, tmp_path: Path) -> None:
    with server_process(tmp_path / "many") as server:
        for number in range(60):
            nan(server, f"run-{number}")
        until(lambda: len(server.get("/alerts", state="firing")["alerts"]) >= 60, within_s=60.0)
        page = tab("/alerts", server=server)
        count = "() => document.querySelectorAll('.alert.card').length"
        page.wait(f"{count} === 50")
        page.page.get_by_role("button", name="Show more").click()
        page.wait(f"{count} >= 60")
        page.page.get_by_label("Search alerts").fill("run-59")
        page.wait(f"{count} === 1")
        assert page.page.locator(".alert a.run").inner_text() == "run-59"


def test_a_silence_is_made_and_ended_in_the_page(server: ServerProcess, tab: OpenTab) -> None:
    page = tab("/alerts", server=server)
    page.page.get_by_role("button", name="Silences").click()
    page.page.locator("#silence-value").fill("two")
    page.page.get_by_role("button", name="Silence", exact=True).click()
    page.wait("() => document.querySelector('.silence-row')?.textContent.includes('run two')")
    nan(server, "two")
    view(page, "Quiet", 1)
    page.page.locator(".silence-row button").click()
    page.wait(
        "() => !document.querySelector('.silence-row') || document.querySelector('.silence-row').textContent.includes('off')"
    )
    view(page, "Open", 1)


def test_texts_of_others_are_text(sick: ServerProcess, tab: OpenTab) -> None:
    judged(sick, "<img src=x onerror=alert(1)>")
    page = tab("/alerts", server=sick)
    page.wait("() => [...document.querySelectorAll('.alert .run')].some((one) => one.textContent.includes('<img'))")
    assert page.page.locator(".alert img").count() == 0


def test_who_may_only_read_is_told_why_there_is_no_button(sick: ServerProcess, tab: OpenTab) -> None:
    judged(sick, "three")
    made = sick.admin("POST", "/keys", {"scope": "read", "name": "reader"})
    page = tab("/alerts", server=sick, extra_http_headers={"Authorization": f"Bearer {made['key']}"})
    page.expected += ["WebSocket", "403", "401"]
    page.wait("() => document.querySelector('#alerts-list .hint')?.textContent.includes('the role operator')")
    assert page.page.locator(".alert button").count() == 0


def test_the_bar_counts_what_the_page_calls_open_and_every_tab_fits_a_phone(
    server: ServerProcess, tab: OpenTab
) -> None:
    said = [Event(kind="alert", time=time.time(), step=9, data={"title": title}) for title in ("one", "two", "three")]
    send(server, "talks", {"loss": np.ones(10)}, np.arange(1, 11), events=said)
    nan(server, "sick")
    until(lambda: len(server.get("/alerts", state="firing")["alerts"]) == 4)
    page = tab("/alerts", server=server, width=390, height=844)
    page.wait("() => document.querySelectorAll('.alert.card').length === 4")
    assert "Open 4" in page.page.locator("#alerts-view").inner_text()
    page.wait("() => document.getElementById('count-alerts').textContent === '4'")
    cut = """() => [...document.querySelectorAll('#alerts-view label')].filter((one) => one.scrollWidth > one.clientWidth
        || one.getBoundingClientRect().right > document.querySelector('#alerts-view').getBoundingClientRect().right
        || one.getBoundingClientRect().right > innerWidth).map((one) => one.textContent)"""
    assert page.page.evaluate(cut) == []


def test_a_card_says_what_happened_to_its_alert(sick: ServerProcess, tab: OpenTab) -> None:
    judged(sick, "told")
    [alert] = [one for one in sick.get("/alerts", state="firing")["alerts"] if one["run_name"] == "told"]
    page = tab("/alerts?q=told", server=sick)
    page.page.locator(f"[data-alert={alert['id']}] summary").click()
    page.wait("() => document.querySelector('.alert.card details ol li time')")
    assert "fired" in page.page.locator(".alert.card details ol").inner_text()
