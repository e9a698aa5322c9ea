"""What people write about a run: under its verdict, and at steps in its charts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from builders import ServerProcess
from recorded import record_run

if TYPE_CHECKING:
    from conftest import OpenTab

pytestmark = pytest.mark.browser

MARKED = """[...document.querySelectorAll('#run-charts .plot.js-plotly-plot')]
  .map((plot) => plot.layout.annotations.filter((one) => one.name === 'note').map((one) => one.x))"""


def test_notes_are_written_under_the_verdict_and_hold_no_html(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run, steps=20)
    page = tab(f"/run/{run}", locale="en-US")
    page.live()
    menu = page.page.get_by_role("button", name="More about this run")
    menu.click()
    page.page.get_by_role("menuitem", name="Add or change notes").click()
    page.page.get_by_label("Notes").fill("Baseline\n- `lr` <img src=x>\n- see https://example.com/plan.")
    page.page.get_by_role("button", name="Save").click()
    page.wait("() => document.querySelector('#run-notes code')?.textContent === 'lr'")
    shown = page.page.locator("#run-notes")
    assert "<img src=x>" in shown.inner_text(), "as text"
    assert shown.locator("img").count() == 0
    assert shown.get_by_role("link", name="https://example.com/plan").count() == 1
    assert site.get(f"/runs/{run}")["notes"].startswith("Baseline\n- `lr`")
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


def test_a_note_at_a_step_is_marked_and_can_be_taken_back(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run)
    page = tab(f"/run/{run}", locale="en-US")
    page.drawn(5)
    loss = page.page.locator('#run-charts [data-name="loss"] .frame')
    loss.hover(position={"x": 300, "y": 90})
    page.page.locator(".tag-at").wait_for()
    loss.click(position={"x": 300, "y": 90}, modifiers=["Shift"])
    dialog = page.page.get_by_role("dialog")
    step = int(dialog.get_by_label("step").input_value())
    assert 100 < step < 300
    dialog.get_by_label("Annotation", exact=True).fill("the data <b>changed</b>")
    dialog.get_by_role("button", name="Save").click()
    dialog.wait_for(state="detached")
    page.wait(f"step => {MARKED}.filter((found) => found[0] === step).length >= 5", argument=step)
    mark = page.page.locator("#run-charts [data-name=loss] .annotation").filter(has_text="◆")
    mark.hover(force=True)
    page.page.locator("#run-charts [data-name=loss] .hoverlayer").get_by_text("the data").wait_for()
    mark.click(force=True)
    told = page.page.locator("#run-charts .chart-notes li")
    assert "the data <b>changed</b>" in told.inner_text()
    told.get_by_role("button", name="Delete").click()
    page.wait(f"() => {MARKED}.every((found) => !found.length)")
    assert site.get(f"/runs/{run}/annotations")["annotations"] == []
    told.get_by_role("button", name="Undo").click()
    page.wait(f"step => {MARKED}.filter((found) => found[0] === step).length >= 5", argument=step)
