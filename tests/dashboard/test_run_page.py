"""The run page in a real browser, on a real server."""

from __future__ import annotations

import math
import time
import uuid
from typing import TYPE_CHECKING

import numpy as np
import pytest
from builders import ServerProcess, server_process, until
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


@pytest.fixture
def run() -> str:
    return f"run-{uuid.uuid4().hex[:8]}"


def test_cpu_run_shows_at_least_twelve_charts_with_titles_units_and_values(
    site: ServerProcess, tab: OpenTab, run: str
) -> None:
    record_run(site, run)
    page = tab(f"/run/{run}")
    page.drawn(12)
    loaded(page, "step_time_s", "process/rss_bytes")
    assert page.page.locator(".chart").count() >= len(CPU_NAMES)
    caption = page.page.locator('#run-charts [data-name="step_time_s"] figcaption')
    assert caption.locator("h2").inner_text() == "Step time"
    assert caption.locator(".unit").inner_text() == "ms"
    assert 80 < float(caption.locator(".now").inner_text()) < 140
    assert page.page.locator('#run-charts [data-name="process/rss_bytes"] .unit').inner_text() == "GiB"


@pytest.mark.long
def test_a_run_without_an_agent_shows_its_own_loss_and_units_that_fit(
    site: ServerProcess, tab: OpenTab, run: str
) -> None:
    for step in range(1, 6):
        metrics = {
            "train/loss": 2.0 + 1 / step,
            "memory/parameters_bytes": 2_010_000.0,
            "host/disk_read_bytes_per_s": 0.0,
        }
        log(site, run, step, project=run, **metrics)
    fleet = tab(f"/runs?project={run}")
    fleet.wait("() => document.querySelector('.ag-row [col-id=loss]')?.textContent === '2.20'")
    fleet.page.locator(".ag-row .name", has_text=run).click()
    fleet.drawn(3)
    fleet.wait("() => document.querySelector('[data-figure=loss]').textContent.includes('2.20min 2.20 at 5')")
    captions = {
        name: fleet.page.locator(f'#run-charts [data-name="{name}"] figcaption').inner_text().split()[-3:-1]
        for name in ("memory/parameters_bytes", "host/disk_read_bytes_per_s")
    }
    assert captions == {"memory/parameters_bytes": ["1.92", "MiB"], "host/disk_read_bytes_per_s": ["0", "B/s"]}
    cut = """() => {
      const left = (node) => node.getBoundingClientRect().left;
      const labels = [...document.querySelectorAll('.plot .ytick text')].filter((label) => label.checkVisibility());
      return labels.filter((label) => left(label) < left(label.closest('.plot'))).length;
    }"""
    assert fleet.page.evaluate(cut) == 0
    log(site, run, 6, project=run, **{"train/loss": math.nan})
    fleet.wait("() => document.querySelector('.verdict h2')?.textContent.startsWith('train/loss became NaN in step 6')")
    facts = fleet.page.locator(".verdict dl").inner_text()
    assert "Last losses" in facts
    assert "Grad norms" not in facts  # there are none
    fleet.wait(
        '() => document.querySelector(\'#run-charts [data-name="train/loss"] .gtitle, [data-name="train/loss"] .annotation\')'
    )


@pytest.mark.long
def test_what_led_to_a_nan_is_its_last_losses_not_the_oldest_that_are_kept(
    site: ServerProcess, tab: OpenTab, run: str
) -> None:
    x = np.arange(1, 32)
    send(site, run, {"loss": np.where(x < 31, x * 1.0, math.nan)}, x)
    page = tab(f"/run/{run}")
    page.wait("() => document.querySelector('.verdict.critical dl')")
    assert "Last losses\n... 26, 27, 28, 29, 30" in page.page.locator(".verdict dl").inner_text()


@pytest.mark.long
def test_a_slow_run_without_an_agent_has_figures_and_axes_in_fitting_units(
    site: ServerProcess, tab: OpenTab, run: str
) -> None:
    x = np.arange(1, 20)
    send(site, run, {"accuracy": 0.5 + 0.0 * x[:7]}, x[:7], seconds_a_step=90)
    page = tab(f"/run/{run}")
    page.wait("() => document.querySelector('.verdict.info h2')?.textContent.startsWith('Nothing to judge yet')")
    assert "Only what the script sends" in page.page.locator(".verdict").inner_text()
    waits = np.where(x == 8, 0.04, 0.0005)
    send(site, run, {"step_time_s": 90.0 + 0.0 * x, "phase/data_s": waits}, x, seq=2, seconds_a_step=90)
    page.drawn(3)
    page.wait("() => document.querySelector('[data-figure=step_time]')?.textContent.includes('90 s')")
    assert "0.667 steps/min" in page.page.locator("[data-figure=step_time]").inner_text()
    assert page.page.locator('#run-charts [data-name="phase/data_s"] .unit').inner_text() == "ms"


def test_point_that_is_logged_arrives_in_the_chart(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run)
    page = tab(f"/run/{run}")
    page.drawn(12)
    page.live()
    before = len(page.requests)
    for step in range(401, 411):
        log(site, run, step, loss=9.5)
    page.wait(LAST, argument=410)
    page.wait("() => document.querySelector('#run-charts [data-name=\"loss\"] .now').textContent === '9.50'")
    asked = [request for request in page.requests[before:] if "/series" in request and "from=" not in request]
    assert asked == [], "live points must come over the WebSocket, not by fetching series"


@pytest.mark.parametrize("late_ms", [pytest.param(1000, marks=pytest.mark.long), 4000])
def test_what_happens_before_the_server_listens_is_shown(
    site: ServerProcess, tab: OpenTab, run: str, late_ms: int
) -> None:
    """Whether the page waits for the server to say that it listens (two seconds), or has drawn itself by then."""
    record_run(site, run, steps=50)
    page = tab(f"/run/{run}", late_ms=late_ms)
    page.live()
    if late_ms > 2000:
        page.drawn(12)
    x = np.arange(51, 52)
    told = {
        "state": "failed",
        "reason": "KeyError: weight",
        "exception": "KeyError",
        "traceback": "Traceback: in train",
    }
    failed = Event(kind="state", time=time.time(), step=51, data=told)
    send(site, run, {"loss": 7.25 + 0.0 * x}, x, seq=2, events=[failed])
    page.wait("() => document.querySelector('#run-head').textContent.includes('failed')")
    page.wait("() => document.body.textContent.includes('KeyError: weight')")
    page.wait("() => document.querySelector('#run-charts [data-name=\"loss\"] .now')?.textContent === '7.25'")
    page.wait(LAST, argument=51)


@pytest.mark.long
def test_metric_that_is_new_gets_a_chart_at_once(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run, steps=50)
    page = tab(f"/run/{run}")
    page.drawn(12)
    for step in (51, 52, 53):
        log(site, run, step, my__accuracy=step / 100)
    page.wait("() => document.querySelector('#run-charts [data-name=\"my/accuracy\"] .plot')?.dataset.points >= 2")


def test_nan_is_written_out_and_marked(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run, steps=100)
    page = tab(f"/run/{run}")
    page.drawn(12)
    loaded(page, "loss")
    log(site, run, 101, loss=math.nan)
    page.wait("() => document.querySelector('[data-figure=\"loss\"] .value')?.textContent === 'NaN'")
    page.wait("() => document.querySelector('#run-charts [data-name=\"loss\"] .plot').data[5].x.length === 1")
    page.wait("() => document.querySelector('.verdict.critical')")


def test_drag_zooms_all_charts_refetches_and_is_in_the_address(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run, steps=20_000)
    until(lambda: "ms a step" in (site.find(f"/runs/{run}/verdict") or {"message": ""})["message"], why="no verdict")
    page = tab(f"/run/{run}")
    page.drawn(12)
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
        "([a, b]) => [...document.querySelectorAll('.plot')].filter(p => p.data?.[3]?.x?.length > 2)"
        ".every(p => p.data[3].x[0] >= a && p.data[3].x.at(-1) <= b)",
        argument=[first, last],
    )
    asked = [request for request in page.requests if "/series" in request and "from=" in request]
    assert len(asked) >= 12
    assert all(f"from={first}&to={last}" in request for request in asked)

    reopened = tab(f"/run/{run}?x={first}-{last}")
    reopened.drawn(12)
    assert reopened.page.locator(".zoomed").inner_text() == f"Steps {first:,} to {last:,}"
    chart = reopened.page.locator('#run-charts [data-name="loss"] .nsewdrag').first

    def zoomed_out() -> bool:
        """A double click, which a page that stalls between the two clicks takes for single ones."""
        chart.dblclick()
        return "x=" not in reopened.page.evaluate("location.search")

    until(zoomed_out, every_s=1.0)
    reopened.wait("() => document.querySelector('#run-charts [data-name=\"loss\"] .plot').data[3].x[0] === 1")


@pytest.mark.long
def test_one_spike_in_a_million_points_is_visible_at_every_zoom(server: ServerProcess, tab: OpenTab, run: str) -> None:
    """With a server of its own: its rules judge a million points for a minute, and other runs' verdicts wait for
    them."""
    total, piece, spike = 1_000_000, 125_000, 654_321
    for seq, start in enumerate(range(0, total, piece), 1):
        steps = np.arange(start + 1, start + piece + 1)
        loss = 2 + 0.1 * np.sin(steps / 500.0)
        if start < spike <= start + piece:
            loss[spike - start - 1] = 1e6
        send(server, run, {"loss": loss}, steps, seq=seq)
    for width in (total, 100_000, 10_000, 1_000, 100, 10):
        first = max(1, spike - width // 2)
        query = "" if width == total else f"?x={first}-{first + width}"
        page = tab(f"/run/{run}{query}", server=server)
        page.drawn(1)
        assert page.page.evaluate(EXTREMES, "loss")[1] == 1e6, f"lost at a width of {width}"
        assert page.page.evaluate(DRAWN_HEIGHT, "loss") > 0.85, f"not drawn at a width of {width}"
        if width > 1000:
            assert page.page.evaluate(EXTREMES, "loss")[0] < 3


@pytest.mark.long
def test_chart_is_fetched_again_before_it_holds_too_many_points(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run, steps=400)
    page = tab(f"/run/{run}")
    page.drawn(12)
    page.live()
    for seq in range(2, 6):
        steps = np.arange(400 * (seq - 1) + 1, 400 * seq + 1)
        send(site, run, {"loss": np.full(400, 2.0)}, steps, seq=seq)
        page.wait(LAST.replace(">= n", ">= n - 300"), argument=int(steps[-1]))
    page.wait("() => Number(document.querySelector('#run-charts [data-name=\"loss\"] .plot').dataset.points) <= 1600")


@pytest.mark.long
def test_theme_follows_the_system_and_the_button_is_remembered(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run, steps=30)
    page = tab(f"/run/{run}", scheme="dark")
    page.drawn(12)
    background = "getComputedStyle(document.body).backgroundColor"
    line = "document.querySelector('#run-charts [data-name=\"loss\"] .plot').data[3].line.color"
    assert page.page.evaluate(background) == "rgb(14, 18, 23)"
    assert page.page.evaluate(line) == "#5cb3ff"
    page.page.locator("#theme").click()
    page.wait("() => document.documentElement.dataset.theme === 'light'")
    page.wait(f"() => {line} === '#0067b1'")
    page.page.reload()
    page.wait("() => document.documentElement.dataset.theme === 'light'")
    assert page.page.evaluate(background) == "rgb(245, 247, 249)"


@pytest.mark.parametrize("path", ["/", "/runs", "/run/{run}"], ids=["overview", "runs", "run"])
def test_phone_has_no_horizontal_scroll(site: ServerProcess, tab: OpenTab, run: str, path: str) -> None:
    record_run(site, run, steps=200, name="a-run-with-a-name-that-is-much-longer-than-a-phone-is-wide-" * 2)
    page = tab(path.format(run=run), width=390, height=844, is_mobile=True, has_touch=True)
    page.wait("() => document.querySelector('.run-row, .ag-row .name, .figure .value')")
    if "{run}" in path:
        page.drawn(1, scrolling_to="#run-charts")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_unknown_run_is_a_clear_page(tab: OpenTab) -> None:
    page = tab("/run/nobody-knows-me")
    page.expected.append("404")
    page.wait("() => document.querySelector('.notice h1')")
    assert page.page.locator(".notice h1").inner_text() == "There is no run nobody-knows-me"
    page.page.locator(".notice a").click()
    page.wait("() => location.pathname === '/runs'")


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
    table, overview = tab("/runs"), tab("/")
    table.wait(
        "text => [...document.querySelectorAll('.ag-row .name')].some(a => a.textContent === text)", argument=evil
    )
    overview.wait(
        "text => [...document.querySelectorAll('.alert .run')].some(a => a.textContent === text)", argument=evil
    )
    for shown in (page, table, overview):
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
    rows = {
        row.locator("dt").inner_text(): row.locator("dd").inner_text()
        for row in page.page.locator(".config > div").all()
    }
    assert {name: text for name, text in rows.items() if not name.startswith("package-")} == {
        "width": "64", "optimizer.class": "AdamW", "optimizer.lr": "0.0003", "optimizer.betas": "0.9, 0.999",
        "command": "python train.py --lr 3e-4",
    }  # fmt: skip
    assert rows["package-79"] == "1.79.0"
    page.page.locator("#config-search").fill("betas 0.999")
    page.wait("() => document.querySelectorAll('#config-sections .config > div').length === 1")
    page.page.locator("#config-search").fill("nothing has this")
    page.wait("() => document.querySelector('#config-sections').textContent.includes('Nothing fits')")


def test_failed_run_shows_exception_and_traceback(site: ServerProcess, tab: OpenTab, run: str) -> None:
    traceback = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: too wide\n'
    ending = Event(
        kind="state", time=time.time(), step=30,
        data={"state": "failed", "reason": "ValueError: too wide", "exception": "ValueError: too wide", "traceback": traceback},
    )  # fmt: skip
    record_run(site, run, steps=30, events=[ending])
    page = tab(f"/run/{run}")
    page.wait("() => document.querySelector('.verdict .traceback')")
    assert page.page.locator(".verdict .traceback").inner_text().strip() == traceback.strip()
    assert page.page.locator(".verdict .own").inner_text().strip() == 'File "train.py", line 3, in <module>'
    assert "ValueError: too wide" in page.page.locator(".verdict .says").inner_text()
    page.page.get_by_role("tab", name="Console").click()
    page.wait("() => document.querySelector('#run-tab .traceback')")
    assert page.page.locator(".run-head .state").inner_text().split()[-1] == "failed"


def test_alert_is_marked_listed_and_can_be_acknowledged(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run, steps=60)
    page = tab(f"/run/{run}")
    page.drawn(12)
    loaded(page, "loss")
    log(site, run, 61, loss=math.nan)
    page.wait("() => document.querySelector('.verdict.critical .proof .plot')?.layout?.shapes.length === 1")
    page.wait("() => document.querySelector('#run-charts [data-name=\"loss\"] .plot').layout.shapes.length === 1")
    flag = "() => document.querySelector('{} .flag')?.textContent === '{}'"
    page.wait(flag.format(".proof", "1 NaN or Inf in view"))  # it shows a part of the run
    page.wait(flag.format('#run-charts [data-name="loss"]', "1 NaN or Inf"))
    page.page.locator(".verdict").get_by_role("button", name="Acknowledge").click()
    dialog = page.page.get_by_role("dialog")
    dialog.get_by_label("Note").fill("I look")
    dialog.get_by_role("button", name="Acknowledge").click()
    page.wait("() => document.querySelector('.verdict .taken q')?.textContent === 'I look'")
    page.page.get_by_role("tab", name="Alerts").click()
    page.wait("() => document.querySelector('#run-tab .alert.card')")


@pytest.mark.long
def test_axis_smoothing_and_log_are_kept_in_the_address(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run)
    page = tab(f"/run/{run}?axis=clock&log=1&smooth=0.8")
    page.drawn(12)
    layout, traces = page.page.evaluate(
        "(() => { const plot = document.querySelector('#run-charts [data-name=\"loss\"] .plot');"
        "return [plot.layout, plot.data] })()"
    )
    assert layout["xaxis"]["type"] == "date"
    assert layout["yaxis"]["type"] == "log"
    assert len(traces[4]["y"]) == len(traces[3]["y"]), "the smoothed line"
    assert traces[3]["opacity"] < 1, "the raw line stays visible behind it"
    page.page.locator(".segment button", has_text="Relative").click()
    page.wait("() => new URLSearchParams(location.search).get('axis') === 'relative'")


@pytest.mark.long
def test_absent_metric_is_not_a_zero(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 41)
    send(site, run, {"loss": 1.0 / x}, x)
    page = tab(f"/run/{run}")
    page.drawn(1)
    page.wait("() => document.querySelector('[data-figure=\"loss\"] .value')?.textContent !== 'n/a'")
    assert page.page.locator("[data-figure]").count() == 1, "what is not known has no tile"


def test_ranks_are_a_band_and_a_map(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 201)
    for rank in range(4):
        event = Event(kind="state", time=time.time(), step=0, data={"state": "starting", "world_size": 4})
        send(
            site,
            run,
            {"loss": 2 + 0.1 * rank + 0.0 * x, "step_time_s": 0.1 + 0.02 * (rank == 3) + 0.0 * x},
            x,
            rank=rank,
            events=[event],
        )
    page = tab(f"/run/{run}")
    loaded(page, "loss")
    low, high = page.page.evaluate(EXTREMES, "loss")
    assert high - low < 0.35
    page.wait("() => document.querySelector('#run-charts [data-name=\"ranks\"] .plot')?.data?.[0].z.length === 4")
    z = page.page.evaluate(
        "document.querySelector('#run-charts [data-name=\"ranks\"] .plot').data[0].z.map(row => row[0])"
    )
    assert z == pytest.approx([1, 1, 1, 1.2], abs=0.01)


def test_page_stays_when_the_server_goes_and_fills_the_gap_when_it_is_back(tmp_path: Path, tab: OpenTab) -> None:
    with server_process(tmp_path / "own") as server:
        record_run(server, "r", steps=100)
        page = tab("/run/r", server=server)
        page.expected += ["net::ERR_", "Failed to fetch", "WebSocket connection", "503"]
        page.drawn(12)
        page.live()
        server.kill()
        page.wait("() => /^stale since \\d\\d:\\d\\d/.test(document.getElementById('feed').textContent)")
        assert page.page.locator(".chart").count() >= 12
        server.start()
        x = np.arange(101, 151)
        send(server, "r", {"loss": 1.0 / x}, x, seq=2)
        page.live()
        page.wait(LAST, argument=150)
