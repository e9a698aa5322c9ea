"""The overview: what needs somebody, and what is running."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from builders import server_process
from recorded import log, record_run, send

from perfagent.wire import Event

if TYPE_CHECKING:
    from conftest import OpenTab
    from playwright.sync_api import Route

pytestmark = pytest.mark.browser

NEWS = "**/_dash-update-component*"


def test_what_needs_somebody_is_first_and_acknowledged_in_place(tmp_path: Path, tab: OpenTab) -> None:
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
        data = ({"title": title, "level": "info"} for title in ("a", "b"))
        infos = [Event(kind="alert", time=time.time(), step=9, data=one) for one in data]
        send(server, "talks", {"loss": np.ones(10)}, np.arange(1, 11), events=infos)
        log(server, "worse", 1, loss=2.0)
        log(server, "worse", 2, loss=math.nan)
        counted = "Open alerts: 3 (1 critical or warning, 2 info)"
        page.wait(f"() => document.querySelector('#overview-head a[href=\"/alerts\"]')?.textContent === '{counted}'")
        page.wait(f"() => document.getElementById('count-alerts').title === '{counted}'")
        assert page.page.locator("#count-alerts").inner_text() == "3"
        page.page.locator("#overview-head a[href='/alerts']").click()
        page.wait("() => document.querySelector('#alerts-view')?.textContent.includes('Open 3')")
