"""axe-core finds nothing on any page, in both themes: names, roles, contrasts, order of headings."""

from __future__ import annotations

import time
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from recorded import record_run

import perfagent
from perfagent.wire import Event

if TYPE_CHECKING:
    from builders import ServerProcess
    from conftest import OpenTab

pytestmark = pytest.mark.browser

CHARTS = "[...document.querySelectorAll('.board .plot')].filter((plot) => plot.dataset.points >= 2).length >= 5"
PAGES = {
    "overview": ("/", "document.querySelector('#overview-running')"),
    "runs": ("/runs?q={run}", "document.querySelector('.ag-row .name')"),
    "run": ("/run/{run}", f"document.querySelector('.verdict') && {CHARTS}"),
    "config": ("/run/{run}?tab=config", "document.querySelector('#config-sections .config')"),
    "console": ("/run/{run}?tab=console", "document.querySelector('#console-lines')"),
    "media": ("/run/{run}?tab=media", "document.querySelector('.media .js-plotly-plot')"),
    "compare": ("/compare?runs={run},{run}:1-30", f"document.querySelector('#compare-settings') && {CHARTS}"),
    "alerts": ("/alerts", "document.querySelector('#alerts-list *')"),
    "channels": ("/settings", "document.querySelector('#settings-channels *')"),
    "rules": ("/settings?tab=rules", "document.querySelector('#settings-rules .form-row')"),
}
"""Each page with what is there once it has all that it shows."""
ALWAYS = {("light", "runs"), ("dark", "run"), ("dark", "channels")}
LONG = [
    pytest.param(*one, marks=[] if one in ALWAYS else pytest.mark.long) for one in product(("light", "dark"), PAGES)
]


def media() -> list[Event]:
    """Of each kind some, of two steps."""
    one = {
        "samples": perfagent.Image(np.zeros((8, 8)), caption="a cat"), "speech": perfagent.Audio(np.zeros(99), 8000, "a word"),
        "answers": perfagent.Table(["n", "text"], [[at, "yes"] for at in range(40)]), "weights": perfagent.Histogram([1, 2]),
    }  # fmt: skip
    return [
        Event(
            kind="media", time=time.time(), step=step,
            data={"name": name, "what": item.kind, "payload": item.encoded(), "caption": item.caption},
        )
        for step in (1, 2) for name, item in one.items()
    ]  # fmt: skip


@pytest.mark.parametrize(("scheme", "page"), LONG)
def test_axe_finds_nothing(site: ServerProcess, tab: OpenTab, run: str, scheme: str, page: str) -> None:
    path, whole = PAGES[page]
    if "{run}" in path:
        start = Event(kind="state", time=time.time(), step=0, data={"state": "starting", "config": {"lr": 0.1}})
        record_run(site, run, steps=60, events=[start, *(media() if page == "media" else [])])
    opened = tab(path.format(run=run), scheme=scheme)
    opened.wait(f"() => document.querySelector('h1') && {whole}")
    opened.page.wait_for_timeout(1200)  # what was there may still be drawn anew
    found = Axe().run(opened.page)
    told = [
        f"{one['id']} ({one['impact']}): {one['help']}: {[node['html'][:160] for node in one['nodes'][:3]]}"
        for one in found.response["violations"]
    ]
    assert told == []
