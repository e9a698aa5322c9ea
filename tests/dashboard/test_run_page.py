"""The run page in a real browser, on a real server."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from builders import ServerProcess, server_process
from recorded import CPU_NAMES, log, record_run, send

from perfagent.wire import Event

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import OpenTab, Tab

pytestmark = pytest.mark.browser

LAST = "n => Number(document.querySelector('#run-charts [data-name=\"loss\"] .plot')?.dataset.lastStep) >= n"
# The finite extremes that are in the drawn traces of a chart.
EXTREMES = """name => {
  const plot = document.querySelector(`#run-charts [data-name="${name}"] .plot`);
  const drawn = plot.data.slice(1, 4).flatMap((trace) => trace.y).filter((y) => y != null);
  return [Math.min(...drawn), Math.max(...drawn)];
}"""
# How high a chart's upper outline reaches, as a share of the plot's height: from the path that is on screen.
DRAWN_HEIGHT = """name => {
  const plot = document.querySelector(`#run-charts [data-name="${name}"] .plot`);
  const lines = [...plot.querySelectorAll('.scatterlayer path.js-line')].map((path) => path.getBBox().height);
  return Math.max(...lines) / plot._fullLayout.yaxis._length;
}"""


def loaded(page: Tab, *names: str) -> None:
    """Waits until these charts have lines."""
    points = 'document.querySelector(`#run-charts [data-name="${name}"] .plot`)?.dataset.points'
    page.wait(f"names => names.every((name) => {points} >= 2)", argument=list(names))


def test_each_chart_stands_in_one_tab_with_title_and_unit(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run)
    page = tab(f"/run/{run}")
    page.drawn(5)
    names = "(host) => [...document.querySelectorAll(`${host} .chart`)].map((one) => one.dataset.name)"
    found = page.page.evaluate(names, "#run-charts")
    assert found == ["loss", "grad/norm", "tokens_per_s", "samples_per_s", "lr"]
    for name, first in (("Time", "step"), ("Hardware", "host/cpu_pct")):
        page.page.get_by_role("tab", name=name).click()
        page.wait(f"first => ({names})('#run-tab')[0] === first", argument=first)
        found += page.page.evaluate(names, "#run-tab")
    assert sorted(found) == sorted([*CPU_NAMES, "step"])
    page.page.locator("[data-figure=step_time]").click()  # leads to its chart, in whatever tab
    caption = page.page.locator('#run-tab [data-name="step_time_s"] figcaption')
    page.wait("() => document.querySelector('#run-tab [data-name=step_time_s].shown')")
    page.wait("() => document.querySelector('#run-tab [data-name=step_time_s] .unit').textContent === 'ms'")
    assert caption.locator("h2").inner_text() == "Step time"
    assert 80 < float(caption.locator(".now").inner_text()) < 140


def test_live_points_come_over_the_socket_and_new_metrics_too(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run)
    page = tab(f"/run/{run}")
    page.drawn(5)
    page.live()
    before = len(page.requests)
    for step in range(401, 411):
        log(site, run, step, loss=9.5)
    page.wait(LAST, argument=410)
    page.wait("() => document.querySelector('#run-charts [data-name=\"loss\"] .now').textContent === '9.50'")
    assert [asked for asked in page.requests[before:] if "/series" in asked and "from=" not in asked] == []
    for step in (411, 412):
        log(site, run, step, my__accuracy=step / 1000)
    page.wait("() => document.querySelector('#run-charts [data-name=\"my/accuracy\"] .plot')?.dataset.points >= 2")


def test_what_happens_before_the_server_listens_is_shown(site: ServerProcess, tab: OpenTab, run: str) -> None:
    """The page waits two seconds for the server to say that it listens, and has drawn itself by then."""
    record_run(site, run, steps=50)
    page = tab(f"/run/{run}", late_ms=4000)
    page.live()
    page.drawn(5)
    failed = Event(kind="state", time=time.time(), step=51, data={"state": "failed", "reason": "KeyError: weight"})
    send(site, run, {"loss": np.array([7.25])}, np.array([51]), seq=2, events=[failed])
    page.wait("() => document.querySelector('#run-head').textContent.includes('failed')")
    page.wait("() => document.body.textContent.includes('KeyError: weight')")
    page.wait("() => document.querySelector('#run-charts [data-name=\"loss\"] .now')?.textContent === '7.25'")
    page.wait(LAST, argument=51)


def test_drag_zooms_all_charts_refetches_and_is_in_the_address(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run, steps=20_000)
    page = tab(f"/run/{run}")
    page.drawn(5)
    page.live()
    chart = page.page.locator('#run-charts [data-name="loss"] .nsewdrag').first
    width = chart.bounding_box()["width"]  # type: ignore[index]
    chart.hover(position={"x": width * 0.25, "y": 40})
    page.page.mouse.down()
    chart.hover(position={"x": width * 0.5, "y": 44}, force=True)  # Plotly has laid a cover over it
    page.page.mouse.up()
    page.wait("() => /x=\\d+-\\d+/.test(location.search)")
    first, last = (int(part) for part in page.page.evaluate("new URLSearchParams(location.search).get('x')").split("-"))
    assert 4_500 < first < 5_500
    assert 9_500 < last < 10_500
    page.wait(
        "([a, b]) => [...document.querySelectorAll('#run-charts .plot')].filter(p => p.data?.[3]?.x?.length > 2)"
        ".every(p => p.data[3].x[0] >= a && p.data[3].x.at(-1) <= b)",
        argument=[first, last],
    )
    asked = [request for request in page.requests if "/series" in request and "from=" in request]
    assert "".join(asked).count("name=") >= 5
    assert all(f"from={first}&to={last}" in request for request in asked)

    reopened = tab(f"/run/{run}?x={first}-{last}")
    reopened.drawn(5)
    assert reopened.page.locator(".zoomed").inner_text() == f"Steps {first:,} to {last:,}"
    reopened.page.keyboard.press("0")
    reopened.wait("() => document.querySelector('#run-charts [data-name=\"loss\"] .plot').data[3].x[0] === 1")


@pytest.mark.long
def test_one_spike_in_many_points_is_visible_at_every_zoom(server: ServerProcess, tab: OpenTab, run: str) -> None:
    """With a server of its own: other runs' verdicts would wait until its rules have judged all points."""
    total, piece, spike = 250_000, 125_000, 154_321
    for seq, start in enumerate(range(0, total, piece), 1):
        steps = np.arange(start + 1, start + piece + 1)
        loss = 2 + 0.1 * np.sin(steps / 500.0)
        if start < spike <= start + piece:
            loss[spike - start - 1] = 1e6
        send(server, run, {"loss": loss}, steps, seq=seq)
    for width in (total, 10_000, 1_000, 10):
        first = max(1, spike - width // 2)
        query = "" if width == total else f"?x={first}-{first + width}"
        page = tab(f"/run/{run}{query}", server=server)
        page.drawn(1)
        assert page.page.evaluate(EXTREMES, "loss")[1] == 1e6, f"lost at a width of {width}"
        assert page.page.evaluate(DRAWN_HEIGHT, "loss") > 0.85, f"not drawn at a width of {width}"
        if width > 1000:
            assert page.page.evaluate(EXTREMES, "loss")[0] < 3


def test_unknown_runs_and_pages_say_so(tab: OpenTab) -> None:
    for path in ("/elsewhere", "/run/nobody-knows-me"):
        page = tab(path)
        page.expected.append("404")
        page.wait("() => document.querySelector('.notice h1')")
    assert page.page.locator(".notice h1").inner_text() == "There is no run nobody-knows-me"
    page.page.locator(".notice a").click()
    page.wait("() => location.pathname === '/runs'")


def test_a_phone_has_no_horizontal_scroll(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run, steps=200, name="a-run-with-a-name-that-is-much-longer-than-a-phone-is-wide-" * 2)
    site.admin("PATCH", f"/runs/{run}", {"tags": ["x" * 90]})
    for path in ("/", "/runs", f"/run/{run}"):
        page = tab(path, width=390, height=844, is_mobile=True, has_touch=True)
        page.wait("() => document.querySelector('.run-row, .ag-row .name, .figure .value')")
        if run in path:
            page.page.evaluate("document.querySelector('#run-charts').scrollIntoView()")
            page.drawn(1)
            assert page.page.locator(".tag").count()
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
    box = page.page.locator(".bar nav").bounding_box()
    assert box is not None and box["y"] + box["height"] >= 840, "the pages are at its bottom"
    page.page.locator(".bar nav a", has_text="Alerts").tap()
    page.wait("() => location.pathname === '/alerts' && document.querySelector('.alerts-page')")


def test_failed_run_shows_its_message_and_end_of_traceback(site: ServerProcess, tab: OpenTab, run: str) -> None:
    said = "ValueError: too wide"
    lines = "".join(f'  File "train.py", line {i}, in step\n' for i in range(60))
    data = {"state": "failed", "reason": said, "exception": said, "traceback": f"{lines}{said}\n"}
    record_run(site, run, steps=30, events=[Event(kind="state", time=time.time(), step=30, data=data)])
    page = tab(f"/run/{run}", width=1440, height=900)
    page.wait("() => document.querySelector('.verdict .traceback')")
    box = "(one) => document.querySelector(one).getBoundingClientRect()"
    height, tabs_y = page.page.evaluate(f"[({box})('.verdict').height, ({box})('.run-tabs').y]")
    assert height <= 160
    assert tabs_y <= 420
    shown = page.page.locator(".verdict .traceback").first.inner_text()
    assert shown.strip().endswith(said), "its end says most"
    assert len(shown.splitlines()) <= 13
    page.page.locator(".verdict summary", has_text="All 20 lines").click()
    assert page.page.locator(".verdict .own").last.inner_text().strip() == 'File "train.py", line 59, in step'
    assert said in page.page.locator(".verdict .says").inner_text()
    page.page.get_by_role("tab", name="Console").click()
    page.wait("() => document.querySelector('#run-tab .traceback')")
    assert page.page.locator(".run-head .state").inner_text().split()[-1] == "failed"


def test_long_cause_wraps_to_two_lines_beside_its_proof(site: ServerProcess, tab: OpenTab, run: str) -> None:
    said = "ValueError: " + "a batch that is far too wide, " * 9
    data = {"state": "failed", "reason": said, "exception": said, "traceback": f"{said}\n"}
    record_run(site, run, steps=30, events=[Event(kind="state", time=time.time(), step=30, data=data)])
    page = tab(f"/run/{run}", width=1440, height=900)
    page.wait("() => document.querySelector('.verdict .rest')")
    lines = "(one) => one.clientHeight / parseFloat(getComputedStyle(one).lineHeight)"
    assert page.page.locator(".verdict .rest").evaluate(lines) == pytest.approx(2, abs=0.1)


@pytest.mark.fault
def test_x06_names_and_messages_of_others_are_text(site: ServerProcess, tab: OpenTab, run: str) -> None:
    evil = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    events = [
        Event(kind="log", time=time.time(), step=1, data={"lines": [evil], "stream": "stdout"}),
        Event(kind="alert", time=time.time(), step=1, data={"title": evil, "text": evil, "level": "critical"}),
    ]
    x = np.arange(1, 31)
    send(site, run, {"loss": 1.0 / x, evil: x * 1.0}, x, name=evil, project=evil, events=events)
    page = tab(f"/run/{run}")
    page.drawn(2)
    assert evil in page.page.locator(".chart h2").all_inner_texts()
    page.page.get_by_role("tab", name="Console").click()
    page.wait("() => document.querySelector('.console-lines')?.textContent.includes('<img')")
    assert page.page.locator(".run-head h1").inner_text() == evil
    table, alerts = tab("/runs?q=onerror"), tab("/alerts?q=onerror")
    for shown, place in ((table, ".ag-row .name"), (alerts, ".alert .run")):
        found = f"[...document.querySelectorAll('{place}')].some(a => a.textContent === text)"
        shown.wait(f"text => {found}", argument=evil)
    for shown in (page, table, alerts):
        assert shown.page.locator("img, main script").count() == 0
        assert "taken" not in shown.page.title()[:5]


def test_configuration_is_divided_and_searched(site: ServerProcess, tab: OpenTab, run: str) -> None:
    start = Event(
        kind="state", time=time.time(), step=0,
        data={
            "state": "starting", "config": {"optimizer": {"class": "AdamW", "lr": 3e-4, "betas": [0.9, 0.999]}, "width": 64},
            "command": ["python", "train.py", "--lr", "3e-4"], "packages": {f"package-{i}": f"1.{i}.0" for i in range(80)},
        },
    )  # fmt: skip
    record_run(site, run, steps=30, events=[start])
    page = tab(f"/run/{run}")
    page.drawn(2)
    page.page.get_by_role("tab", name="Config").click()
    page.wait("() => document.querySelector('#config-sections .config')")
    for section in ("Code", "Packages"):
        page.page.locator("#config-sections summary", has_text=section).click()
    shown = page.page.locator(".config > div").all()
    rows = {row.locator("dt").inner_text(): row.locator("dd").inner_text() for row in shown}
    assert {name: text for name, text in rows.items() if not name.startswith("package-")} == {
        "width": "64", "optimizer.class": "AdamW", "optimizer.lr": "0.0003", "optimizer.betas": "0.9, 0.999",
        "command": "python train.py --lr 3e-4",
    }  # fmt: skip
    assert rows["package-79"] == "1.79.0"
    page.page.locator("#config-search").fill("betas 0.999")
    page.wait("() => document.querySelectorAll('#config-sections .config > div').length === 1")
    page.page.locator("#config-search").fill("nothing has this")
    page.wait("() => document.querySelector('#config-sections').textContent.includes('Nothing fits')")


def test_alert_is_marked_listed_and_can_be_acknowledged(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run, steps=60)
    page = tab(f"/run/{run}")
    page.drawn(5)
    loaded(page, "loss")
    log(site, run, 61, loss=math.nan)
    page.wait("() => document.querySelector('[data-figure=\"loss\"] .value')?.textContent === 'NaN'")
    page.wait("() => document.querySelector('#run-charts [data-name=\"loss\"] .plot').data[5].x.length === 1")
    page.wait("() => document.querySelector('.verdict.critical .proof .plot')?.layout?.shapes.length === 1")
    page.wait("() => document.querySelector('#run-charts [data-name=\"loss\"] .plot').layout.shapes.length === 1")
    flag = "() => document.querySelector('{} .flag')?.textContent === '{}'"
    page.wait(flag.format(".proof", "1 NaN or Inf in view"))  # it shows a part of the run
    page.wait(flag.format('#run-charts [data-name="loss"]', "1 NaN or Inf"))
    page.page.locator(".verdict").get_by_role("button", name="Acknowledge").click()
    page.wait("() => document.querySelector('.verdict .when')?.textContent.includes('local has it')")
    page.page.get_by_role("tab", name="Alerts").click()
    page.wait("() => document.querySelector('#run-tab .alert.card')")


@pytest.mark.long
def test_axis_smoothing_and_log_are_kept_in_the_address(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run)
    page = tab(f"/run/{run}?axis=clock&log=1&smooth=0.8")
    page.drawn(5)
    plot = page.page.locator('#run-charts [data-name="loss"] .plot')
    layout, traces = plot.evaluate("plot => [plot.layout, plot.data]")
    assert layout["xaxis"]["type"] == "date"
    assert layout["yaxis"]["type"] == "log"
    assert len(traces[4]["y"]) == len(traces[3]["y"]), "the smoothed line"
    assert traces[3]["opacity"] < 1, "the raw line stays visible behind it"
    page.page.locator(".segment button", has_text="Relative").click()
    page.wait("() => new URLSearchParams(location.search).get('axis') === 'relative'")


def test_ranks_are_a_band_and_a_map(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 201)
    for rank in range(4):
        event = Event(kind="state", time=time.time(), step=0, data={"state": "starting", "world_size": 4})
        values = {"loss": 2 + 0.1 * rank + 0.0 * x, "step_time_s": 0.1 + 0.02 * (rank == 3) + 0.0 * x}
        send(site, run, values, x, rank=rank, events=[event])
    page = tab(f"/run/{run}")
    loaded(page, "loss")
    low, high = page.page.evaluate(EXTREMES, "loss")
    assert high - low < 0.35
    page.page.get_by_role("tab", name="Ranks").click()
    page.wait("() => document.querySelector('#run-tab .js-plotly-plot')?.data?.[0].z.length === 4")
    z = page.page.locator("#run-tab .js-plotly-plot").evaluate("plot => plot.data[0].z.map(row => row[0])")
    assert z == pytest.approx([1, 1, 1, 1.2], abs=0.01)


def test_page_stays_when_the_server_goes_and_fills_the_gap_later(tmp_path: Path, tab: OpenTab) -> None:
    with server_process(tmp_path / "own") as server:
        record_run(server, "r", steps=100)
        page = tab("/run/r", server=server)
        page.expected += ["net::ERR_", "Failed to fetch", "WebSocket connection", "503", "did not respond"]
        page.drawn(5)
        page.live()
        server.kill()
        page.wait("() => /^stale since \\d\\d:\\d\\d/.test(document.getElementById('feed').textContent)")
        assert page.page.locator(".chart").count() >= 5
        assert "nothing that you press is saved" in page.page.locator(".offline").inner_text()
        page.page.get_by_role("tab", name="Console").click()
        page.wait("() => document.querySelector('.offline.again')")
        selected = page.page.locator(".run-tabs [aria-selected=true]")
        assert selected.get_attribute("data-value") == "charts", "a click that would be lost is not taken"
        server.start()
        x = np.arange(101, 151)
        send(server, "r", {"loss": 1.0 / x}, x, seq=2)
        page.live()
        assert page.page.locator(".offline").count() == 0
        page.wait(LAST, argument=150)
