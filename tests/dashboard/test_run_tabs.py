"""The tabs of a run beside its charts, and what its menu changes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from recorded import record_run, send, training

from perfagent.wire import Event

if TYPE_CHECKING:
    from builders import ServerProcess
    from conftest import OpenTab

pytestmark = pytest.mark.browser


def test_the_console_is_searched_by_stream_and_downloaded(
    site: ServerProcess, tab: OpenTab, run: str, tmp_path: Path
) -> None:
    lines = [("stdout", ["epoch 1", "epoch 2 <b>"]), ("stderr", ["warning: slow"])]
    told = [
        Event(kind="log", time=time.time(), step=1, data={"stream": stream, "lines": text}) for stream, text in lines
    ]
    record_run(site, run, steps=20, events=told)
    page = tab(f"/run/{run}?tab=console")
    shown = page.page.locator("#console-lines")
    page.wait("() => document.querySelector('#console-lines')?.textContent.includes('warning: slow')")
    assert "epoch 2 <b>" in shown.inner_text()
    page.page.locator("#console-search").fill("/epoch [2-9]/")
    page.wait("() => !document.querySelector('#console-lines').textContent.includes('epoch 1')")
    assert "epoch 2" in shown.inner_text()
    page.page.locator("#console-search").fill("")
    page.page.locator("#console-stream label", has_text="stderr").click()
    page.wait("() => !document.querySelector('#console-lines').textContent.includes('epoch')")
    with page.page.expect_download() as saved:
        page.page.locator("#console-download").click()
    saved.value.save_as(tmp_path / "console.txt")
    assert (tmp_path / "console.txt").read_text() == "epoch 1\nepoch 2 <b>\nwarning: slow\n"


def test_layers_are_a_map_in_the_order_of_the_model(site: ServerProcess, tab: OpenTab, run: str) -> None:
    steps = np.arange(1, 51)
    layers = {f"grad_norm/block.{at}": (at + 1) * np.ones(50) for at in (10, 2)}
    send(site, run, training(steps) | layers, steps)
    page = tab(f"/run/{run}?tab=layers")
    traces = "[...document.querySelectorAll('#run-tab .js-plotly-plot')].flatMap((plot) => plot.data)"
    drawn = f"{traces}.find((one) => one.type === 'heatmap')"
    page.wait(f"() => {drawn}?.z.length === 2")
    assert page.page.evaluate(f"[...{drawn}.y].map(String)") == ["block.2", "block.10"]


def test_name_and_tags_are_changed_and_the_run_is_deleted(site: ServerProcess, tab: OpenTab, run: str) -> None:
    for one in (run, f"{run}-stays"):
        record_run(site, one, steps=20)
    link = site.admin("POST", "/session/links")["url"].removeprefix(site.url)
    page = tab(link, locale="en-US")  # apart: other tests are no administrators
    page.page.goto(f"{site.url}/run/{run}")
    page.wait("() => document.querySelector('#run-head h1')")
    menu = page.page.get_by_role("button", name="More about this run")
    menu.click()
    page.page.get_by_role("menuitem", name="Name and tags").click()
    page.page.locator("#run-name").fill("better <i>name</i>")
    page.page.locator("#run-tags").fill("keep")
    page.page.locator("#run-tags").press("Enter")
    page.page.get_by_role("button", name="Save").click()
    page.wait("() => document.querySelector('#run-head h1').textContent.includes('better <i>name</i>')")
    kept = site.get(f"/runs/{run}")
    assert (kept["name"], kept["tags"]) == ("better <i>name</i>", ["keep"])
    menu.click()
    page.page.get_by_role("menuitem", name="Delete this run").click()
    page.page.get_by_role("dialog").get_by_role("button", name="Delete this run").click()
    page.wait("() => location.pathname === '/runs'")
    assert site.find(f"/runs/{run}") is None
    page.wait("() => document.querySelector('.ag-row a.name')")


def straggles(site: ServerProcess, run: str, *, slow: int, ranks: int = 4, steps: int = 240) -> None:
    """All ranks have steps of the same length; one works the most of it, and the others wait."""
    x = np.arange(1, steps + 1)
    draw = np.random.default_rng(0)
    for rank in range(ranks):
        own = (0.22 if rank == slow else 0.08) * (1 + 0.02 * draw.standard_normal(steps))
        columns = {"step_time_s": np.full(steps, 0.23), "phase/comm_s": 0.23 - own, "phase/backward_s": own}
        begins = Event(
            kind="state", time=time.time(), data={"state": "running", "heartbeat": False, "world_size": ranks}
        )
        send(site, run, columns, x, rank=rank, events=[begins], seconds_a_step=0.23)


def test_ranks_are_compared_by_their_own_work(site: ServerProcess, tab: OpenTab, run: str) -> None:
    straggles(site, run, slow=2)
    page = tab(f"/run/{run}?tab=ranks")
    page.wait("() => document.querySelector('.verdict.critical .rank-bars')")
    bars = page.page.locator(".rank-bars > div")
    assert bars.count() == 4
    assert bars.first.inner_text().startswith("rank 2")
    assert bars.first.get_attribute("class") == "named"
    times = bars.first.inner_text().rpartition("· ")[2]
    first = page.page.locator("#run-tab .plain tbody tr").first.locator("td").all_inner_texts()
    assert (first[0], first[3]) == ("2", times), "verdict and table have the same figure"
    assert page.page.locator(".run-tabs [data-value=ranks] .severity.critical").count() == 1
    assert page.page.locator(".run-tabs [data-value=time] .severity").count() == 0


def test_stacks_of_a_run_with_one_process_have_a_tab(site: ServerProcess, tab: OpenTab, run: str) -> None:
    frames = ["train.py:12 in main", "queue.py:171 in get: self.not_empty.wait()"]
    thread = {"name": "MainThread", "thread": 1, "training": True, "main": True, "frames": frames, "state": "S"}
    looked = Event(kind="stacks", time=time.time(), step=20, data={"step": 20, "threads": [thread], "look": 1})
    record_run(site, run, steps=20, events=[looked])
    page = tab(f"/run/{run}")
    page.page.get_by_role("tab", name="Stacks").click()
    page.wait("() => document.querySelector('#run-tab .stack')?.textContent.includes('self.not_empty.wait()')")


@pytest.mark.long
def test_stacks_and_a_profile_are_asked_for_from_the_page(site: ServerProcess, tab: OpenTab, run: str) -> None:
    for rank in range(2):
        begins = Event(
            kind="state", time=time.time(), step=0, data={"state": "starting", "world_size": 2, "host": "node1"}
        )
        record_run(site, run, steps=20, rank=rank, events=[begins])
    page = tab(f"/run/{run}?tab=ranks")
    page.page.get_by_role("button", name="Take stacks").first.click()
    page.wait("() => document.body.textContent.includes('Asked for the stacks of all ranks')")
    page.page.get_by_role("tab", name="Time").click()
    page.page.get_by_role("button", name="Profile 5 steps").first.click()
    page.wait("() => document.body.textContent.includes('Asked for a profile of 5 steps')")
    asked = site.get(f"/runs/{run}/commands")["commands"]
    assert {one["kind"] for one in asked} == {"stacks", "profile"}
