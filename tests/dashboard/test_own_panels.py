"""Panels of one's own on the Charts tab: made, drawn, changed, deleted and brought back, on all runs of a project."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from builders import ServerProcess, web
from recorded import log, send

if TYPE_CHECKING:
    from conftest import OpenTab, Tab

pytestmark = pytest.mark.browser

DRAWN = """text => [...document.querySelectorAll('[data-section=own] .chart')]
  .find((card) => card.querySelector('h2')?.textContent === text && Number(card.querySelector('.plot')?.dataset.points) > 1)"""
NOW = "document.querySelector('[data-section=own] .chart .now').textContent"


def two_losses(site: ServerProcess, run: str, *, project: str) -> None:
    x = np.arange(1, 101)
    send(site, run, {"train/loss": 3.0 - x / 100, "val/loss": 3.5 - x / 100}, x, project=project)


def write(page: Tab, line: str, title: str = "") -> None:
    dialog = page.page.get_by_role("dialog")
    dialog.get_by_label("Line", exact=True).first.fill(line)
    dialog.get_by_label("Title").fill(title)
    dialog.get_by_role("button", name="Save").click()


def choose(page: Tab, title: str, item: str) -> None:
    page.page.get_by_label(f"Menu of {title}").click()
    page.page.get_by_role("menuitem", name=item).click()


def test_an_expression_is_one_chart_of_all_runs_of_the_project(site: ServerProcess, tab: OpenTab, run: str) -> None:
    project = f"panels-{run}"
    for one in (run, f"{run}-b"):
        two_losses(site, one, project=project)
    page = tab(f"/run/{run}", locale="en-US")
    page.expected.append("422")
    page.drawn(2)
    page.page.get_by_role("button", name="+ Add a panel").click()
    write(page, "val/loss-train/loss", "Gap")
    alert = page.page.get_by_role("dialog").get_by_role("alert")
    page.wait(
        "() => document.querySelector('dialog [role=alert]').textContent.includes('no series `val/loss-train/loss`')"
    )
    assert "signs stand between spaces" in alert.inner_text()
    write(page, "val/loss - train/loss", "Gap")
    page.wait(DRAWN, argument="Gap")
    page.wait(f"() => {NOW} === '0.500'")
    log(site, run, 101, project, train__loss=1.0, val__loss=3.0)
    page.wait(f"() => {NOW} === '2'")

    other = tab(f"/run/{run}-b", locale="en-US")
    other.wait(DRAWN, argument="Gap")
    choose(other, "Gap", "Change this panel")
    write(other, "val/loss / train/loss", "Ratio")
    other.wait(DRAWN, argument="Ratio")
    choose(other, "Ratio", "Delete this panel")
    other.page.get_by_text("The panel “Ratio” is deleted").wait_for()
    assert panels(site, project) == []
    other.page.get_by_role("button", name="Undo").click()
    other.wait(DRAWN, argument="Ratio")
    assert [one["lines"][0]["expression"] for one in panels(site, project)] == ["val/loss / train/loss"]


def panels(site: ServerProcess, project: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = site.get("/panels", project=project)["panels"]
    return found


def test_the_report_has_notes_annotations_and_expressions(site: ServerProcess, run: str) -> None:
    project = f"panels-{run}"
    two_losses(site, run, project=project)
    site.admin("PATCH", f"/runs/{run}", {"notes": "line one\nline <two>"})
    site.admin("POST", f"/runs/{run}/annotations", {"step": 40, "text": "new data"})
    lines = ["val/loss - train/loss", "absent - train/loss", "val/loss"]
    site.admin("PUT", f"/panels/gap?project={project}", {"title": "Gap", "lines": lines})
    page = web().get(f"{site.url}/report/{run}").text
    assert "line one\nline &lt;two&gt;" in page
    assert "step 40: new data" in page
    charts = re.findall(r'data-name="([^"]+)"', page)
    assert charts == ["val/loss - train/loss", "train/loss", "val/loss"]
    assert page.count('class="mark note"') == len(charts)
