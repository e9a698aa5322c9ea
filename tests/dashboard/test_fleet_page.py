"""The fleet page in a real browser, on a real server."""

from __future__ import annotations

import math
import time
import uuid
from typing import TYPE_CHECKING

import numpy as np
import pytest
from builders import ServerProcess, server_process, web
from recorded import log, record_run, send

from perfagent.wire import Event, Frame, encode

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import OpenTab

pytestmark = pytest.mark.browser


def row(run: str) -> str:
    return f'tr[data-run="{run}"]'


@pytest.fixture
def run() -> str:
    return f"run-{uuid.uuid4().hex[:8]}"


def test_run_is_one_line_with_state_verdict_and_values(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run)
    page = tab("/")
    page.wait(f"() => document.querySelector('{row(run)} .spark path')")
    line = page.page.locator(row(run))
    assert line.locator(".state").inner_text().split()[-1] == "running"
    assert line.locator(".state i").inner_text(), "a state has a shape, not only a colour"
    assert line.locator(".of-step").inner_text() == "400"
    assert line.locator(".of-gpu").inner_text() == "n/a"
    assert line.locator("td.of-verdict").inner_text().strip()
    assert "tok/s" in line.locator(".of-throughput").inner_text()


def test_new_run_appears_and_its_values_move_without_a_fetch_of_the_list(
    site: ServerProcess, tab: OpenTab, run: str
) -> None:
    page = tab("/")
    page.live()
    record_run(site, run, steps=50)
    page.wait(f"() => (document.querySelector('{row(run)} .of-loss')?.textContent ?? 'n/a') !== 'n/a'")
    before = len([request for request in page.requests if request.startswith("/api/v1/runs?")])
    for step in range(51, 56):
        log(site, run, step, loss=7.25, step_time_s=0.1)
    page.wait(f"() => document.querySelector('{row(run)} .of-loss').textContent === '7.25'")
    page.wait(f"() => document.querySelector('{row(run)} .of-step').textContent === '55'")
    assert len([request for request in page.requests if request.startswith("/api/v1/runs?")]) == before


def test_an_open_fleet_page_leaves_agents_at_their_pace_and_hears_of_deleted_runs(
    site: ServerProcess, tab: OpenTab, run: str
) -> None:
    record_run(site, run, steps=20)
    page = tab("/")
    page.live()
    page.wait(f"() => (document.querySelector('{row(run)} .of-loss')?.textContent ?? 'n/a') !== 'n/a'")
    here = Frame(project="test", run=run, source=f"{run}-ping", attempt=1, rank=0, seq=1)
    answer = web().post(
        f"{site.url}/api/v1/ingest", content=encode(here), headers={"Content-Type": "application/x-msgpack"}
    )
    assert answer.raise_for_status().headers["perfagent-watched"] == "0"
    before = len(page.requests)
    page.expected.append("404 (Not Found)")  # an alert of the run may have made the page ask for it once more
    site.admin("DELETE", f"/runs/{run}")
    page.wait(f"() => !document.querySelector('{row(run)}')")
    assert not [request for request in page.requests[before:] if request.startswith("/api/v1/runs?")]


def shows_loss(name: str) -> str:
    """Whether the line of the run of that name shows a text as its loss."""
    return f"""text => [...document.querySelectorAll('.runs tr')].some(line =>
      line.querySelector('.name')?.textContent === '{name}' && line.querySelector('.of-loss').textContent === text)"""


SLOW_TO_ASK = """
const send = WebSocket.prototype.send;
let asked = 0;
WebSocket.prototype.send = function (text) {
  if (asked++ === 0) send.call(this, text);
  else setTimeout(() => send.call(this, text), 1500);
};
"""
"""All that a page asks for after its first question reaches the server late."""


def test_a_loss_that_moved_before_the_server_listened_for_it_is_shown(
    site: ServerProcess, tab: OpenTab, run: str
) -> None:
    for step in (1, 2):
        log(site, run, step, project=run, sft__avg_loss=3.0)
    page = tab("/", before=SLOW_TO_ASK)
    page.live()
    page.wait(shows_loss(run), argument="3")
    log(site, run, 3, project=run, sft__avg_loss=7.25)
    page.wait(shows_loss(run), argument="7.25")


def test_a_run_that_ended_before_the_server_listened_is_shown_as_ended(
    site: ServerProcess, tab: OpenTab, run: str
) -> None:
    record_run(site, run, steps=20)
    page = tab("/", late_ms=4000)
    page.wait(f"() => document.querySelector('{row(run)} .state')?.textContent.includes('running')")
    x = np.arange(21, 22)
    failed = Event(kind="state", time=time.time(), step=21, data={"state": "failed", "reason": "test"})
    send(site, run, {"loss": 7.25 + 0.0 * x}, x, seq=2, events=[failed])
    page.wait(f"() => document.querySelector('{row(run)} .state')?.textContent.includes('failed')")


def test_a_loss_of_any_name_moves_and_runs_of_one_name_are_told_apart(
    site: ServerProcess, tab: OpenTab, run: str
) -> None:
    name = f"twin-{run}"
    for one in (f"{run}-a", f"{run}-b"):
        record_run(site, one, steps=2, name=name)
    for step in (1, 2):
        log(site, run, step, project=run, sft__avg_loss=3.0)
    page = tab("/")
    page.live()
    page.wait(shows_loss(run), argument="3")
    log(site, run, 3, project=run, sft__avg_loss=7.25)
    page.wait(shows_loss(run), argument="7.25")
    for one in (f"{run}-a", f"{run}-b"):
        assert one in page.page.locator(f"{row(one)} small").first.inner_text()


def test_verdict_of_a_line_follows_its_alerts(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run, steps=50)
    page = tab("/")
    page.wait(f"() => document.querySelector('{row(run)} td.of-verdict .severity')")
    log(site, run, 51, loss=math.nan)
    page.wait(f"() => document.querySelector('{row(run)} td.of-verdict .severity.critical')")
    page.wait(f"() => document.querySelector('{row(run)} .of-loss').textContent === 'NaN'")


def test_search_and_project_filter_are_in_the_address(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run, steps=20, project=f"project-{run}")
    record_run(site, f"{run}-b", steps=20)
    page = tab("/")
    page.wait(f"() => document.querySelector('{row(run)}')")
    visible = (
        "() => [...document.querySelectorAll('.runs tr[data-run]')].filter(r => !r.hidden).map(r => r.dataset.run)"
    )
    page.page.locator("#fleet-text").fill(f"{run}-B")
    assert page.page.evaluate(visible) == [f"{run}-b"]
    page.page.locator("#fleet-text").fill("")
    page.page.locator("#fleet-project select").select_option(f"project-{run}")
    assert page.page.evaluate(visible) == [run]
    assert f"project=project-{run}" in page.page.url
    reopened = tab(f"/?project=project-{run}&state=finished")
    reopened.wait("() => document.querySelector('#fleet-note .hint')")
    reopened.page.locator("#fleet-note button").click()
    assert run in reopened.page.evaluate(visible)


def test_click_opens_the_run_and_back_returns(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run)
    page = tab("/")
    page.page.locator(f"{row(run)} .name").click()
    page.wait("() => location.pathname.startsWith('/run/')")
    page.drawn(12)
    page.page.go_back()
    page.wait("() => document.querySelector('.runs tr[data-run]')")
    sockets = [request for request in page.requests if request == "/ws/live"]
    assert len(sockets) == 3, "one connection a page"


def test_empty_fleet_shows_both_ways_to_attach(tmp_path: Path, tab: OpenTab) -> None:
    with server_process(tmp_path / "empty") as server:
        page = tab("/", server=server)
        page.wait("() => document.querySelector('.welcome')")
        code = page.page.locator(".welcome .way code").all_inner_texts()
        assert any("perfagent run train.py" in text and server.url in text for text in code)
        assert any(f'perfagent.attach(model, optimizer, server="{server.url}")' in text for text in code)
        phone = tab("/", server=server, width=390, height=844, is_mobile=True, has_touch=True)
        phone.wait("() => document.querySelector('.welcome')")
        assert phone.page.evaluate("document.documentElement.scrollWidth") <= 390
        cut = "() => [...document.querySelectorAll('.welcome pre')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"
        assert phone.page.evaluate(cut) == 0
        record_run(server, "first", steps=20)
        page.wait(f"() => document.querySelector('{row('first')}')")
        assert page.page.locator(".welcome").count() == 0


def test_page_that_does_not_exist_says_so(tab: OpenTab) -> None:
    page = tab("/elsewhere")
    page.expected.append("404")  # the browser notes the page's own status
    page.wait("() => document.querySelector('.notice')")
    assert "/elsewhere" in page.page.locator(".notice").inner_text()
    page.page.locator(".notice a").click()
    page.wait("() => location.pathname === '/' && document.querySelector('[data-page=fleet]')")
