"""The Media tab of a run: of each name what one step has, chosen by a slider."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from recorded import record_run, send, training

import perfagent
from perfagent.wire import Event

if TYPE_CHECKING:
    from builders import ServerProcess
    from conftest import OpenTab

pytestmark = pytest.mark.browser


def logged(name: str, what: str, step: int, payload: bytes, **data: Any) -> Event:
    return Event(
        kind="media", time=time.time(), step=step, data={"name": name, "what": what, "payload": payload, **data}
    )


def pictures(step: int, count: int = 2) -> list[Event]:
    encoded = perfagent.Image(np.full((8, 8, 3), step % 255, np.uint8)).encoded()
    told = [{"index": at, "caption": f"cat {at} at {step}"} for at in range(count)]
    return [logged("samples", "image", step, encoded, **one) for one in told]


def table(step: int) -> Event:
    rows = [[f"<i>row {at}</i>", at] for at in range(150)]
    return logged(
        "answers", "table", step, json.dumps({"columns": ["text", "n"], "rows": rows, "count": 4000}).encode()
    )


CAPTIONS = "() => [...document.querySelectorAll('.picture span')].map((one) => one.textContent).join() === '{}'"
SEEN = """() => [...document.querySelectorAll('.picture img')].every((one) => one.naturalWidth === 8 && one.loading === 'lazy')"""


def test_the_media_of_a_run_are_seen_step_by_step(site: ServerProcess, tab: OpenTab, run: str) -> None:
    sound = logged("speech", "audio", 10, perfagent.Audio(np.zeros(99), 8000).encoded(), caption="a word")
    shapes = [logged("weights", "histogram", step, perfagent.Histogram(np.arange(step)).encoded()) for step in (10, 20)]
    record_run(site, run, steps=20, events=[*pictures(10), *pictures(20), table(20), sound, *shapes])
    page = tab(f"/run/{run}?tab=media")
    page.wait(CAPTIONS.format("cat 0 at 20,cat 1 at 20"))
    page.wait(SEEN)
    cells = page.page.locator(".media td")
    assert (cells.count(), cells.first.inner_text()) == (200, "<i>row 0</i>")
    assert "3,900 more rows" in page.page.locator("#media-sections").inner_text()
    page.wait("() => document.querySelector('.media audio')?.src")
    page.wait("() => document.querySelector('.media .js-plotly-plot')?.data[0].x.join() === '10,20'")
    page.page.locator(".picture").first.click()
    page.wait("() => document.querySelector('dialog.enlarged-picture[open] img')?.naturalWidth === 8")
    page.page.keyboard.press("Escape")
    page.wait("() => !document.querySelector('dialog.enlarged-picture')")
    page.page.get_by_role("slider", name="Step of samples").press("Home")
    page.wait(CAPTIONS.format("cat 0 at 10,cat 1 at 10"))
    page.live()
    x = np.arange(21, 31)
    send(site, run, training(x), x, seq=2, events=[*pictures(30), table(30)])
    page.wait("() => document.querySelector('#media-sections').textContent.includes('30')", timeout_s=60)
    page.wait(CAPTIONS.format("cat 0 at 10,cat 1 at 10"))  # who looks at an older step stays there
    page.page.get_by_role("slider", name="Step of samples").press("End")
    page.wait(CAPTIONS.format("cat 0 at 30,cat 1 at 30"))


def test_a_page_lists_what_it_shows_of_thousands_of_images(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run, steps=20, events=[one for step in range(1, 1001) for one in pictures(step, 2)])
    page = tab(f"/run/{run}?tab=media")
    page.wait(CAPTIONS.format("cat 0 at 1000,cat 1 at 1000"))
    page.wait(SEEN)
    asked = [one for one in page.requests if "/media/" in one]
    assert len(asked) == 2, asked


def test_a_run_without_media_has_no_tab_for_them(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run, steps=20)
    page = tab(f"/run/{run}?tab=media")
    page.drawn(1)
    assert page.page.get_by_role("tab", name="Media").count() == 0
