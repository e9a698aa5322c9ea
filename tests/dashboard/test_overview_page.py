"""The overview: what needs somebody, and what is running."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from builders import server_process, until
from playwright.sync_api import Route
from recorded import log, record_run, send

from perfagent.wire import Event

if TYPE_CHECKING:
    from conftest import OpenTab

pytestmark = pytest.mark.browser


def test_a_sick_run_is_one_row_acknowledged_and_undone(tmp_path: Path, tab: OpenTab) -> None:
    with server_process(tmp_path / "few") as server:
        page = tab("/", server=server)
        page.wait("() => document.querySelector('.welcome')")
        code = page.page.locator(".welcome .way code").all_inner_texts()
        assert any("perfagent run train.py" in text and server.url in text for text in code)
        assert any(f'server="{server.url}"' in text for text in code)
        record_run(server, "well", steps=60)
        page.wait("() => document.querySelector('.all-well') && document.querySelector('.run-row')")
        log(server, "sick", 1, loss=2.0)
        log(server, "sick", 2, loss=math.nan)
        page.wait("() => document.querySelector('.alert.card h2')?.textContent === 'The loss became NaN in step 2'")
        assert page.page.locator("h1").first.inner_text().startswith("1 of 2 runs needs attention")
        page.wait("() => document.getElementById('count-alerts').textContent === '1'")
        page.page.keyboard.press("j")
        page.page.keyboard.press("a")
        page.wait("() => document.querySelector('.all-well')")
        [alert] = server.get("/alerts?state=firing")["alerts"]
        assert alert["acknowledged_by"] == "local"
        page.wait("() => document.getElementById('count-alerts').textContent === ''")
        page.page.get_by_role("button", name="Undo").click()
        page.wait("() => document.querySelector('.alert.card h2')")
        [alert] = server.get("/alerts?state=firing")["alerts"]
        assert alert["acknowledged"] is None


def test_runs_alike_are_one_line_and_no_sick_run_is_left_out(tmp_path: Path, tab: OpenTab) -> None:
    with server_process(tmp_path / "many") as server:
        for number in range(12):
            log(server, f"sick-{number}", number + 1, loss=2.0)
            log(server, f"sick-{number}", number + 2, loss=math.nan)
        said = [{"title": f"reward below {one}", "level": "warning"} for one in range(40)]
        told = [Event(kind="alert", time=time.time(), step=9, data=one) for one in said]
        send(server, "talks", {"loss": np.ones(10)}, np.arange(1, 11), events=told)
        until(lambda: server.get("/alerts/inbox")["counts"]["open"] == 52, within_s=60.0)
        page = tab("/", server=server)
        page.wait("() => document.querySelectorAll('#overview-alerts > .alert').length === 2")
        lines = page.page.locator("#overview-alerts > .alert")
        assert "12 runs" in lines.nth(0).inner_text()
        assert "The loss became NaN in step …" in lines.nth(0).inner_text()
        assert "+39 alerts" in lines.nth(1).inner_text(), "one run is one row, whatever it has"
        assert page.page.locator("h1").first.inner_text().startswith("13 of 13 runs need attention")
        page.page.get_by_role("button", name="Acknowledge 12").click()
        page.wait("() => document.querySelectorAll('#overview-alerts > .alert').length === 1")
        page.page.get_by_role("button", name="Undo").click()
        page.wait("() => document.querySelectorAll('#overview-alerts > .alert').length === 2")


def test_runs_that_ended_are_listed_where_none_is_running(tmp_path: Path, tab: OpenTab) -> None:
    with server_process(tmp_path / "over") as server:
        for number in range(7):
            end = Event(kind="state", time=time.time(), data={"state": "finished"})
            losses = [2.0] * 9 + [math.nan if number == 6 else 1.0]
            send(server, f"over-{number}", {"loss": losses}, np.arange(1, 11), events=[end])
        until(lambda: server.get("/runs/over-6/verdict")["rule"] == "nonfinite_loss", within_s=60.0)
        page = tab("/", server=server)
        page.wait("() => document.querySelectorAll('#overview-running .run-row').length === 4")
        page.page.get_by_role("button", name="Acknowledge").click()
        page.wait("() => document.querySelectorAll('#overview-running .run-row').length === 5")
        first = page.page.locator("#overview-running .run-row").first
        assert first.get_attribute("href") == "/run/over-6"
        assert first.locator(".severity.critical").count() == 1 and "NaN in step 10" in first.inner_text()
        log(server, "runs", 1, loss=2.0)
        page.wait("() => document.querySelectorAll('#overview-running .run-row').length === 1")


def _instead_of_acts(answer: Callable[[Route], None], route: Route) -> None:
    if "notes.sendNotifications" in (route.request.post_data or ""):
        answer(route)
    else:
        route.continue_()


def test_a_click_without_an_answer_is_said_to_have_failed(tmp_path: Path, tab: OpenTab) -> None:
    with server_process(tmp_path / "fails") as server:
        log(server, "sick", 1, loss=2.0)
        log(server, "sick", 2, loss=math.nan)
        until(lambda: server.get("/alerts/inbox")["counts"]["open"])
        page = tab("/", server=server)
        page.live()
        page.expected += ["net::ERR_", "Failed to fetch", "500", "Callback"]
        acts = re.compile("_dash-update-component")
        for answer in (Route.abort, partial(Route.fulfill, status=500)):
            page.page.route(acts, partial(_instead_of_acts, answer))
            page.page.get_by_role("button", name="Acknowledge").click()
            note = page.page.get_by_text("what you pressed is not done")
            note.wait_for()
            page.page.unroute(acts)
            note.locator("xpath=ancestor::*[@role='alert']").get_by_role("button").click()
            note.wait_for(state="detached")
            page.wait("() => !document.querySelector('.offline') && !document.querySelector('.pending')")
        page.page.get_by_role("button", name="Acknowledge").click()
        page.wait("() => document.querySelector('.all-well')")
