"""The overview: what needs somebody, and what is running."""

from __future__ import annotations

import math
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from builders import ServerProcess, server_process, until
from recorded import log, record_run, send

from perfagent.wire import Event

if TYPE_CHECKING:
    from conftest import OpenTab
    from playwright.sync_api import Route

pytestmark = pytest.mark.browser

NEWS = "**/_dash-update-component*"


def test_what_needs_somebody_is_first_and_is_acknowledged_in_place(tmp_path: Path, tab: OpenTab) -> None:
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
        news: list[Route] = []
        page.page.route(NEWS, lambda asked: news.append(asked), times=1)  # held until somebody writes
        with page.page.expect_request(NEWS):
            log(server, "new", 1, loss=1.0)
        page.page.get_by_role("button", name="Acknowledge").click()
        page.page.get_by_label("Note").fill("I look into it")
        news[0].continue_()
        page.wait("() => [...document.querySelectorAll('.run-row b')].some((name) => name.textContent === 'new')")
        page.page.get_by_role("dialog").get_by_role("button", name="Acknowledge").click()
        page.wait("() => document.querySelector('.all-well')")
        [alert] = server.get("/alerts?state=firing")["alerts"]
        assert (alert["note"], alert["acknowledged_by"]) == ("I look into it", "local")
        page.wait("() => document.getElementById('count-alerts').textContent === ''")


def test_bar_overview_and_alerts_page_count_open_alerts_alike(tmp_path: Path, tab: OpenTab) -> None:
    with server_process(tmp_path / "counts") as server:
        said = [
            Event(kind="alert", time=time.time(), step=9, data={"title": title, "level": "info"})
            for title in ("a", "b")
        ]
        send(server, "talks", {"loss": np.ones(10)}, np.arange(1, 11), events=said)
        log(server, "sick", 1, loss=2.0)
        log(server, "sick", 2, loss=math.nan)
        until(lambda: len(server.get("/alerts", state="firing")["alerts"]) == 3)
        page = tab("/", server=server)
        told = "Open alerts: 3 (1 critical or warning, 2 info)"
        page.wait(f"() => document.querySelector('#overview-head a[href=\"/alerts\"]')?.textContent === '{told}'")
        page.wait(f"() => document.getElementById('count-alerts').title === '{told}'")
        assert page.page.locator("#count-alerts").inner_text() == "3"
        assert page.page.locator("h1").first.inner_text().startswith("1 of 2 runs needs attention")
        page.page.locator("#overview-head a[href='/alerts']").click()
        page.wait("() => document.querySelector('#alerts-view')?.textContent.includes('Open 3')")


def test_links_to_the_old_table_lead_to_the_new_one(tab: OpenTab) -> None:
    page = tab("/?state=failed&q=some")
    page.wait("() => location.pathname === '/runs' && location.search.includes('state=failed')")


def test_a_page_that_does_not_exist_says_so(tab: OpenTab) -> None:
    page = tab("/elsewhere")
    page.expected.append("404")  # the browser notes the page's own status
    page.wait("() => document.querySelector('.notice')")
    page.page.locator(".notice a").click()
    page.wait("() => location.pathname === '/runs' && document.querySelector('.runs-page')")


def test_a_phone_has_the_pages_at_its_bottom(site: ServerProcess, tab: OpenTab) -> None:
    record_run(site, f"phone-{uuid.uuid4().hex[:6]}", steps=20)
    page = tab("/", width=390, height=844, is_mobile=True, has_touch=True)
    page.wait("() => document.querySelector('.run-row')")
    box = page.page.locator(".bar nav").bounding_box()
    assert box is not None and box["y"] + box["height"] >= 840
    page.page.locator(".bar nav a", has_text="Alerts").tap()
    page.wait("() => location.pathname === '/alerts' && document.querySelector('.alerts-page')")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
    cut = "() => [...document.querySelectorAll('.run-row .says')].filter((one) => one.scrollWidth > one.clientWidth).length"
    assert page.page.evaluate(cut) == 0
