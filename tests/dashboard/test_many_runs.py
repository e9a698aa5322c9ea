"""The fleet page of a server with more runs than one page of the list, and pages whose address or run is lost."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from builders import ServerProcess, server_process, web
from recorded import record_run, send

from perfagent.wire import Event

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import OpenTab

pytestmark = pytest.mark.browser

VISIBLE = "() => [...document.querySelectorAll('.runs tr[data-run]')].filter(r => !r.hidden).map(r => r.dataset.run)"
SHOWN = "page => document.querySelector('[data-page]')?.dataset.page === page"
NOTING_SOCKETS = """
window.sockets = [];
window.WebSocket = class extends WebSocket {
  constructor(...address) {
    super(...address);
    window.sockets.push(this);
  }
};
"""


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two old runs, of which one failed, below 105 newer ones."""
    x = np.arange(1, 3)
    with server_process(tmp_path_factory.mktemp("crowded")) as server:
        failed = Event(kind="state", time=time.time(), step=2, data={"state": "failed", "reason": "test"})
        send(server, "ancient-failed", {"loss": 1.0 / x}, x, project="attic", events=[failed])
        send(server, "ancient-other", {"loss": 1.0 / x}, x, project="attic")
        for i in range(105):
            send(server, f"new-{i:03d}", {"loss": 1.0 / x}, x, project="new")
        yield server


def test_a_text_finds_a_run_beyond_the_first_page(crowded: ServerProcess, tab: OpenTab) -> None:
    page = tab("/", server=crowded)
    page.wait("() => document.querySelector('.runs tr[data-run]')")
    assert "ancient-other" not in page.page.evaluate(VISIBLE)
    page.page.locator("#fleet-text").fill("ANCIENT-OTHER")
    page.wait(f"() => JSON.stringify(({VISIBLE})()) === '[\"ancient-other\"]'")
    page.page.locator("#fleet-text").fill("nobody is called so")
    page.wait("() => document.querySelector('#fleet-note').textContent.includes('No run matches')")


@pytest.mark.long
def test_state_and_project_of_an_address_reach_beyond_the_first_page(crowded: ServerProcess, tab: OpenTab) -> None:
    for address in ("/?state=failed", "/?project=attic&q=failed"):
        page = tab(address, server=crowded)
        page.wait(f"() => ({VISIBLE})().includes('ancient-failed')")
    assert page.page.locator("#fleet-project select").input_value() == "attic"


@pytest.mark.long
def test_a_count_that_is_not_of_all_runs_says_so(crowded: ServerProcess, tab: OpenTab) -> None:
    page = tab("/", server=crowded)
    page.wait("() => document.querySelector('#fleet-states [data-state=\"\"] b')?.textContent === '100+'")
    chip = page.page.locator('#fleet-states [data-state="failed"]')
    assert chip.locator("b").count() == 0, "a state that no known run is in has no number, and can be chosen"
    chip.click()
    page.wait("() => document.querySelector('#fleet-states [data-state=\"failed\"] b')?.textContent === '1'")
    chip.click()
    page.page.locator("#fleet-note button").click()
    page.wait("() => document.querySelector('#fleet-states [data-state=\"\"] b').textContent === '107'")


@pytest.mark.long
def test_fleet_and_logo_take_the_filter_away(crowded: ServerProcess, tab: OpenTab) -> None:
    for link in (".bar nav a", ".logo"):
        page = tab("/?q=new-00", server=crowded)
        page.wait(f"() => ({VISIBLE})().length === 10")
        page.page.locator(link).click()
        page.wait("() => location.search === ''")
        page.wait(f"() => ({VISIBLE})().length >= 100")
        assert page.page.locator("#fleet-text").input_value() == ""
        page.page.go_back()
        page.wait(f"() => ({VISIBLE})().length === 10")


@pytest.mark.long
def test_a_page_whose_request_was_lost_comes_by_itself(crowded: ServerProcess, tab: OpenTab) -> None:
    page = tab("/", server=crowded)
    page.expected += ["ERR_FAILED", "Failed to fetch", "Callback failed"]
    page.wait("() => document.querySelector('.runs .name')")
    lost = re.compile("_dash-update")
    page.page.route(lost, lambda route: route.abort())
    page.page.locator(".runs .name").first.click()
    page.wait("() => location.pathname.startsWith('/run/')")
    page.page.locator("#fleet-text").fill("typed meanwhile")
    page.page.unroute(lost)
    page.wait(SHOWN, argument="run", timeout_s=10)
    assert "q=" not in page.page.url


def delete(server: ServerProcess, run: str) -> None:
    token = (server.folder / "server-data" / "admin-token").read_text().strip()
    answer = web().delete(f"{server.url}/api/v1/runs/{run}", headers={"Authorization": f"Bearer {token}"}, timeout=30)
    answer.raise_for_status()


def test_a_deleted_run_leaves_the_fleet_and_its_page_says_so(crowded: ServerProcess, tab: OpenTab) -> None:
    record_run(crowded, "short-lived", steps=30)
    fleet = tab("/", server=crowded, before=NOTING_SOCKETS)
    page = tab("/run/short-lived", server=crowded)
    for opened in (fleet, page):
        opened.expected.append("404")  # of what either asks before it hears that the run is gone; the browser notes it
    page.drawn(2)
    fleet.wait("() => document.querySelector('tr[data-run=short-lived]')")
    fleet.live()
    delete(crowded, "short-lived")
    fleet.page.evaluate("() => window.sockets.forEach((socket) => socket.close())")
    fleet.wait("() => !document.querySelector('tr[data-run=short-lived]')")
    page.page.keyboard.press("+")
    page.wait("() => document.querySelector('.notice h1')?.textContent === 'There is no run short-lived'")
    assert all(path.startswith("/api/v1/runs/short-lived") for path in fleet.missing + page.missing)
