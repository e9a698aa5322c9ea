"""axe-core finds nothing on any page, in both themes: names, roles, contrasts, order of headings."""

from __future__ import annotations

import uuid
from itertools import product
from typing import TYPE_CHECKING

import pytest
from axe_playwright_python.sync_playwright import Axe
from recorded import record_run

if TYPE_CHECKING:
    from builders import ServerProcess
    from conftest import OpenTab

pytestmark = pytest.mark.browser

PAGES = {
    "overview": "/",
    "runs": "/runs?q={run}",
    "run": "/run/{run}",
    "config": "/run/{run}?tab=config",
    "console": "/run/{run}?tab=console",
    "compare": "/compare?runs={run},{run}:1-30",
    "alerts": "/alerts",
    "channels": "/settings",
    "rules": "/settings?tab=rules",
}
ALWAYS = {("light", "runs"), ("dark", "run"), ("dark", "channels")}
LONG = [
    pytest.param(*one, marks=[] if one in ALWAYS else pytest.mark.long) for one in product(("light", "dark"), PAGES)
]


@pytest.mark.parametrize(("scheme", "page"), LONG)
def test_axe_finds_nothing(site: ServerProcess, tab: OpenTab, scheme: str, page: str) -> None:
    run = f"axe-{uuid.uuid4().hex[:6]}"
    if "{run}" in PAGES[page]:
        record_run(site, run, steps=60)
    opened = tab(PAGES[page].format(run=run), scheme=scheme)
    opened.wait("() => document.querySelector('h1')")
    opened.page.wait_for_timeout(1200)
    found = Axe().run(opened.page)
    told = [
        f"{one['id']} ({one['impact']}): {one['help']}: {[node['html'][:160] for node in one['nodes'][:3]]}"
        for one in found.response["violations"]
    ]
    assert told == []
