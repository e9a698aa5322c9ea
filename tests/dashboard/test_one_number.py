"""One number for one thing: step time, throughput and shares are the same wherever a person looks at once."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from builders import ServerProcess, until
from command_line import command
from recorded import send

from perfagent.wire import Event

if TYPE_CHECKING:
    from conftest import OpenTab

pytestmark = pytest.mark.browser

STEPS = 400
TILE = "name => document.querySelector(`[data-figure=${name}] .value`)?.textContent"


def records(site: ServerProcess, run: str, *, ends: bool) -> dict[str, Any]:
    """Sends a run that gets slower step by step, so that no two windows have the same figures, and by too little for a
    finding. Answers the figures of the window that everybody sees: worked out here by other means."""
    x = np.arange(1, STEPS + 1)
    took = 0.1 + 0.0001 * x
    columns = {
        "loss": 1.0 / x, "step_time_s": took, "tokens_per_s": 512 / took, "samples_per_s": 16 / took,
        "phase/data_s": took * 0.08 * x / STEPS, "phase/forward_s": took * (1 - 0.08 * x / STEPS),
    }  # fmt: skip
    end = [Event(kind="state", time=time.time(), step=STEPS, data={"state": "finished"})] if ends else []
    send(site, run, columns, x, events=end)
    shown = slice(None) if ends else slice(-100, None)
    return {
        "step_time_s": float(np.median(took[shown])),
        "tokens_per_s": float(np.median(columns["tokens_per_s"][shown])),
        "data": float(columns["phase/data_s"][shown].sum() / took[shown].sum()),
        "steps": STEPS if ends else 100,
        "words": "the whole run" if ends else "the newest 100 steps",
    }


@pytest.mark.parametrize("ends", [False, True], ids=["live", "ended"])
def test_tiles_show_table_and_verdict_have_the_same_figures(
    site: ServerProcess,
    tab: OpenTab,
    run: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ends: bool,
) -> None:
    wanted = records(site, run, ends=ends)
    said = f"{1000 * wanted['step_time_s']:.0f} ms per step (median of {wanted['words']})"
    until(lambda: said in site.get(f"/runs/{run}/verdict")["message"], why="the verdict has another step time")

    monkeypatch.setenv("PERFAGENT_SERVER", site.url)
    shown = json.loads(command(capsys, "show", run, "--json").out)
    timing = shown["timing"]
    assert timing == site.get(f"/runs/{run}/timing") == site.get("/timing", run=run)["timing"][run]
    assert said in shown["verdict"]["message"]
    assert timing["window"]["steps"] == wanted["steps"]
    assert timing["window"]["whole_run"] == ends
    assert timing["series"]["step_time_s"]["p50"] == pytest.approx(wanted["step_time_s"])
    assert timing["rates"]["tokens_per_s"]["p50"] == pytest.approx(wanted["tokens_per_s"])
    assert timing["shares"]["data"] == timing["phase_shares"]["data"] == pytest.approx(wanted["data"])

    page = tab(f"/run/{run}")
    in_words = wanted["words"].removeprefix("the ")
    page.wait("said => document.querySelector('.verdict .says')?.textContent.includes(said)", argument=said)
    page.wait(f"text => ({TILE})('step_time') === text", argument=f"{1000 * wanted['step_time_s']:.0f} ms")
    throughput = f"{wanted['tokens_per_s'] / 1000:.2f}k tok/s"
    assert page.page.evaluate(TILE, "throughput") == throughput
    assert page.page.evaluate(TILE, "bottleneck") == f"{100 * wanted['data']:.1f} %"
    bar = page.page.locator(".bar-of-step")
    assert bar.locator("h3").inner_text() == f"Where a step goes, {in_words}"
    assert f"{100 * wanted['data']:.1f} %" in bar.inner_text()

    table = tab(f"/runs?q={run}")
    line = f'document.querySelector(\'[row-id="{run}"] [col-id="timing.throughput"]\')?.textContent'
    table.wait(f"text => {line} === text", argument=throughput)


def test_alerts_are_marked_on_the_charts_that_their_rules_name(site: ServerProcess, run: str) -> None:
    send(site, run, {"loss": np.ones(3)}, np.arange(1, 4))
    marks = site.get(f"/runs/{run}", **{"with": "marks"})["marks"]
    assert marks == {rule["rule"]: rule["charts"] for rule in site.get("/rules")["rules"]}


def test_what_the_charts_of_a_page_ask_for_comes_together(site: ServerProcess, tab: OpenTab, run: str) -> None:
    send(site, run, {name: np.ones(3) for name in ("loss", "lr", "grad/norm", "mine")}, np.arange(1, 4))
    page = tab(f"/run/{run}")
    page.drawn(4)
    (asked,) = [path for path in page.requests if "/series" in path]
    assert sorted(re.findall(r"&name=([^&]+)", asked)) == ["grad%2Fnorm", "loss", "lr", "mine"]
    assert len([path for path in page.requests if path.startswith(f"/api/v1/runs/{run}?")]) == 1


def test_the_page_says_how_many_names_were_left_out(site: ServerProcess, tab: OpenTab, run: str) -> None:
    told = {"limit": 2000, "names": ["user/1", "user/2", "user/3"], "count": 1234}
    left_out = Event(kind="left_out", time=time.time(), data=told)
    send(site, run, {"loss": np.ones(3)}, np.arange(1, 4), events=[left_out])
    page = tab(f"/run/{run}")
    page.wait(
        "() => document.querySelector('.facts .left-out')?.textContent.startsWith('1,234 metric names of this run were')"
    )
