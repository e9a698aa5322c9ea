"""The inbox: who has an alert, what keeps it quiet, and each act with its undo."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING

import playwright.sync_api as playwright_errors
import pytest
from builders import ServerProcess, server_process, until
from recorded import log

if TYPE_CHECKING:
    from conftest import OpenTab, Tab

pytestmark = pytest.mark.browser


def nan(server: ServerProcess, run: str) -> None:
    log(server, run, 1, loss=2.0)
    log(server, run, 2, loss=math.nan)


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
    page = tab("/alerts", server=server, late_ms=1500)
    page.wait("() => document.querySelector('#alerts-list')?.textContent === 'Nothing needs you now.'")
    nan(server, "one")  # while the page is being opened
    page.wait("() => document.querySelector('.alert.card')")
    page.live()
    act(page, server, "Snooze 1 hour")
    page.wait("() => !document.querySelector('.alert.card')")
    view(page, "Quiet", 1)
    assert "snoozed until" in page.page.locator(".alert .facts").inner_text()
    page.wait("() => location.search.includes('view=quiet')")
    act(page, server, "End the snooze")
    page.wait("() => !document.querySelector('.alert.card')")
    view(page, "Open", 1)
    act(page, server, "Mute this rule in this run")
    view(page, "Quiet", 1)
    assert "muted until somebody undoes it" in page.page.locator(".alert .facts").inner_text()
    act(page, server, "End the mute")
    view(page, "Open", 1)
    page.page.get_by_role("button", name="Acknowledge").click()
    view(page, "Acknowledged", 1)
    assert "local has it" in page.page.locator(".alert .facts").inner_text()
    page.page.get_by_role("button", name="Note").click()
    note = page.page.get_by_placeholder("What others should know")
    note.fill("I look into it")
    note.press("Enter")  # there, wherever the focus went when the list was drawn anew
    page.wait("() => document.querySelector('.alert .facts q')?.textContent === 'I look into it'")
    page.page.get_by_role("button", name="Take back").click()
    view(page, "Open", 1)
    act(page, server, "Resolve")
    view(page, "Resolved", 1)
    page.page.get_by_role("button", name="Silences").click()
    page.page.locator("#silence-value").fill("two")
    page.page.get_by_role("button", name="Silence", exact=True).click()
    page.wait("() => document.querySelector('.silence-row')?.textContent.includes('run two')")
    nan(server, "two")
    view(page, "Quiet", 1)
    page.page.locator(".silence-row button").click()
    page.wait("() => document.querySelector('.silence-row')?.textContent.includes('off') !== false")
    view(page, "Open", 1)


def test_alerts_alike_are_one_line_that_unfolds(tab: OpenTab, tmp_path: Path) -> None:
    with server_process(tmp_path) as server:
        evil = "<img src=x onerror=alert(1)>"
        for run in (evil, *(f"run-{number}" for number in range(59))):
            nan(server, run)
        alerts = until(lambda: (found := server.get("/alerts", state="firing")["alerts"])[59:] and found, within_s=60.0)
        page = tab("/alerts", server=server, width=390, height=844)
        page.wait("() => document.querySelectorAll('[data-view=open] > .alert.card').length === 1")
        assert "60 alerts in 60 runs" in page.page.locator(".fold").inner_text()
        cut = """() => [...document.querySelectorAll('#alerts-view label')].filter((one) =>
            one.scrollWidth > one.clientWidth || one.getBoundingClientRect().right > innerWidth).length"""
        assert page.page.evaluate(cut) == 0, "every tab fits a phone"
        page.page.locator(".fold summary").first.click()
        page.wait("() => document.querySelectorAll('.folded .alert').length === 50")
        assert page.page.locator(".folded .hint").inner_text() == "and 10 more"
        page.page.locator(".folded .alert summary").nth(3).click()
        page.wait("() => document.querySelectorAll('.folded .alert')[3].querySelector('ol li time')")
        assert "fired" in page.page.locator(".folded .alert").nth(3).inner_text()
        page.page.get_by_label("Search alerts").fill("<img")
        page.wait("() => document.querySelectorAll('.alert.card').length === 1")
        assert page.page.locator(".alert a.run").inner_text() == evil
        assert page.page.locator(".alert img").count() == 0
        page.page.get_by_label("Search alerts").fill("run-")
        page.wait("() => document.querySelector('.fold')?.textContent.includes('59 alerts in 59 runs')")
        page.page.get_by_role("button", name="Acknowledge 59").click()
        page.wait("() => document.querySelector('#alerts-view')?.textContent.includes('Acknowledged 59')")
        left = [one for one in server.get("/alerts", state="firing")["alerts"] if not one["acknowledged"]]
        assert [one["run_name"] for one in left] == [evil], "what is not shown is not acknowledged"
        assert len(alerts) == 60

        made = server.admin("POST", "/keys", {"scope": "read", "name": "reader"})
        page = tab("/alerts", server=server, extra_http_headers={"Authorization": f"Bearer {made['key']}"})
        page.expected += ["WebSocket", "403", "401"]
        page.wait("() => document.querySelector('#alerts-list .hint')?.textContent.includes('the role operator')")
        assert page.page.locator(".alert button").count() == 0
