"""What people write about a run: under its verdict, and at steps in its charts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from builders import ServerProcess
from recorded import record_run

if TYPE_CHECKING:
    from conftest import OpenTab

pytestmark = pytest.mark.browser


def test_notes_are_written_under_the_verdict_and_hold_no_html(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run, steps=20)
    page = tab(f"/run/{run}", locale="en-US")
    page.live()
    menu = page.page.get_by_role("button", name="More about this run")
    menu.click()
    page.page.get_by_role("menuitem", name="Add a note").click()
    page.page.get_by_label("Notes").fill("**Baseline** <img src=x> https://example.com/plan")
    page.page.get_by_role("button", name="Save").click()
    page.wait("() => document.querySelector('#run-notes strong')?.textContent === 'Baseline'")
    shown = page.page.locator("#run-notes")
    assert "<img src=x>" in shown.inner_text(), "as text"
    assert shown.locator("img").count() == 0
    assert shown.get_by_role("link", name="https://example.com/plan").count() == 1
    assert site.get(f"/runs/{run}")["notes"].startswith("**Baseline**")
    shown.get_by_role("button", name="Change").click()
    page.page.get_by_label("Notes").fill("half written")
    site.admin("PATCH", f"/runs/{run}", {"notes": "by another"})
    page.wait("() => document.querySelector('#run-notes').textContent.includes('by another')")
    assert page.page.get_by_label("Notes").input_value() == "half written", (
        "what is new of others does not take it away"
    )
    page.page.get_by_role("button", name="Cancel").click()
    page.page.get_by_label("Notes").wait_for(state="detached")
    assert site.get(f"/runs/{run}")["notes"] == "by another"
