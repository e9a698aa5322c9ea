"""What the run page says in words and numbers is so: extremes, newest values, ranks, endings, units, and what is read
aloud."""

from __future__ import annotations

import math
import time
import uuid
from typing import TYPE_CHECKING

import numpy as np
import pytest
from builders import ServerProcess, web
from recorded import log, record_run, send

from perfagent.wire import Event

if TYPE_CHECKING:
    from conftest import OpenTab
    from playwright.sync_api import APIResponse, Route

pytestmark = [pytest.mark.browser, pytest.mark.long]


@pytest.fixture
def run() -> str:
    return f"run-{uuid.uuid4().hex[:8]}"


def more(name: str) -> str:
    return f"document.querySelector('[data-figure=\"{name}\"] .more')?.textContent"


def value(name: str) -> str:
    return f"document.querySelector('[data-figure=\"{name}\"] .value')?.textContent"


def newest(name: str) -> str:
    return f"document.querySelector('#run-charts [data-name=\"{name}\"] .now')?.firstChild?.textContent"


def test_an_extreme_in_a_bucket_of_steps_is_near(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 8001)
    send(site, run, {"loss": 2 - 1.5 * (x == 4321), "grad/norm": 1 + 4.0 * (x == 1234)}, x)
    page = tab(f"/run/{run}")
    page.wait(f"() => /^min 0.500 near step 4.[123]\\dk$/.test({more('loss')})")


def test_an_extreme_over_ranks_is_one_of_the_mean_that_the_figure_shows(
    site: ServerProcess, tab: OpenTab, run: str
) -> None:
    x = np.arange(1, 101)
    for rank in range(2):
        event = Event(kind="state", time=time.time(), step=0, data={"state": "starting", "world_size": 2})
        send(site, run, {"loss": 3.0 - x / 100 + rank}, x, rank=rank, events=[event])
    page = tab(f"/run/{run}")
    page.wait(f"() => {value('loss')} === '2.50'")
    page.wait(f"() => {more('loss')}.startsWith('min 2.5')")


def test_figure_and_chart_tell_one_newest_value_whichever_answer_came_first(
    site: ServerProcess, tab: OpenTab, run: str
) -> None:
    x = np.arange(1, 8014)  # whose last bucket holds several steps
    send(site, run, {"loss": np.where(x == 8013, 9.0, 2.0)}, x)
    page = tab("/")

    def late(route: object) -> None:
        time.sleep(0.6)
        route.continue_()  # type: ignore[attr-defined]

    page.page.route("**/names", late)
    page.page.goto(f"{site.url}/run/{run}")
    page.drawn(1)
    page.wait(f"() => {value('loss')} === '9'")
    page.wait(f"() => {newest('loss')} === '9'")


def test_a_late_answer_does_not_replace_a_newer_live_value(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 51)
    send(site, run, {"loss": 2.0 + 0.0 * x}, x)
    page = tab("/")
    held: list[tuple[Route, APIResponse]] = []
    page.page.route("**/latest", lambda route: held.append((route, route.fetch())))
    page.page.goto(f"{site.url}/run/{run}")
    page.wait(f"() => {value('loss')} === '2'")
    while not held:
        page.page.wait_for_timeout(50)
    send(site, run, {"loss": np.array([7.25])}, np.array([51]), seq=2)
    page.wait(f"() => {value('loss')} === '7.25'")
    for route, answer in held:
        route.fulfill(response=answer)
    page.drawn(1)
    page.wait(f"() => {newest('loss')} === '7.25'")


def test_ranks_that_only_a_script_reports_are_counted(site: ServerProcess, tab: OpenTab, run: str) -> None:
    for step in range(1, 4):
        for rank in range(3):
            metrics = {"loss": 1.0 + rank, "step_time_s": 0.1}
            row = {"project": "tests", "run": run, "rank": rank, "step": step, "metrics": metrics}
            web().post(f"{site.url}/api/v1/log", json=row, timeout=30).raise_for_status()
    page = tab(f"/run/{run}")
    page.wait("() => document.querySelector('.facts')?.textContent.includes('3 ranks')")
    page.wait("() => document.querySelector('#run-charts [data-name=\"ranks\"] .plot')?.data?.[0].z.length === 3")


def test_what_is_a_sum_of_processes_says_so(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 21)
    for rank in range(4):
        event = Event(kind="state", time=time.time(), step=0, data={"state": "starting", "world_size": 4})
        values = {
            "process/cpu_pct": 200 + 0.0 * x,
            "process/rss_bytes": 2.0**30 + 0.0 * x,
            "host/cpu_pct": 64 + 0.0 * x,
        }
        send(site, run, values, x, rank=rank, events=[event])
    page = tab(f"/run/{run}")
    page.wait(f"() => {more('device')} === '4 processes, together 800 %'")
    page.wait(f"() => {more('memory')} === '4 processes'")


def test_how_it_ended_has_the_message_and_the_end_of_the_traceback(site: ServerProcess, tab: OpenTab, run: str) -> None:
    lines = "".join(f'  File "train.py", line {i}, in step\n' for i in range(60))
    said = "ValueError: too wide"
    data = {"state": "failed", "reason": said, "exception": "ValueError", "traceback": f"{lines}{said}\n"}
    record_run(site, run, steps=30, events=[Event(kind="state", time=time.time(), step=30, data=data)])
    page = tab(f"/run/{run}")
    page.wait("() => document.querySelector('.verdict .traceback')")
    shown = page.page.locator(".verdict .traceback").first.inner_text()
    assert shown.strip().endswith(said), "its end says most"
    assert len(shown.splitlines()) <= 13
    page.page.locator(".verdict summary", has_text="All 20 lines").click()


def test_units_are_not_cut_and_names_keep_their_ends(site: ServerProcess, tab: OpenTab, run: str) -> None:
    x = np.arange(1, 21)
    names = [f"train/{'a_really_long_name_' * 4}{end}" for end in ("query", "key")]
    send(site, run, {"samples_per_s": 74_100 + 0.0 * x, **dict.fromkeys(names, x * 1.0)}, x)
    page = tab(f"/run/{run}", width=1200)
    page.drawn(3)
    page.wait(f"() => {value('throughput')} === '74.1k samples/s'")
    cut = "() => [...document.querySelectorAll('.figure .value')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"
    assert page.page.evaluate(cut) == 0
    ends = """() => [...document.querySelectorAll('[data-group="logged"] h2')].map((h2) => {
      const range = document.createRange();
      const text = h2.firstElementChild.firstChild;
      range.setStart(text, text.length - 3);
      range.setEnd(text, text.length);
      const [end, box] = [range.getBoundingClientRect(), h2.getBoundingClientRect()];
      return h2.scrollWidth > h2.clientWidth && end.left >= box.left - 1 && end.right <= box.right + 1;
    })"""
    assert page.page.evaluate(ends) == [True, True]


def test_a_long_tag_does_not_make_a_phone_scroll_sideways(site: ServerProcess, tab: OpenTab, run: str) -> None:
    event = Event(kind="state", time=time.time(), step=0, data={"state": "starting", "tags": ["x" * 90]})
    record_run(site, run, steps=20, events=[event])
    token = (site.folder / "server-data" / "admin-token").read_text().strip()
    change = web().patch(
        f"{site.url}/api/v1/runs/{run}", json={"tags": ["x" * 90]}, headers={"Authorization": f"Bearer {token}"}
    )
    change.raise_for_status()
    page = tab(f"/run/{run}", width=390, height=844, is_mobile=True, has_touch=True)
    page.wait("() => document.querySelector('.tag')")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_only_another_verdict_is_read_aloud(site: ServerProcess, tab: OpenTab, run: str) -> None:
    record_run(site, run, steps=60)
    page = tab(f"/run/{run}")
    page.wait("() => document.querySelector('#run-announced')?.textContent.startsWith('healthy')")
    assert page.page.locator("#run-verdict[aria-live], .figure output").count() == 0
    assert page.page.locator(".board .tools").get_attribute("aria-label") == "Chart controls"
    everything = "{ childList: true, characterData: true, subtree: true }"
    page.page.locator("#run-announced").evaluate(
        f"node => {{ window.said = 0; new MutationObserver(() => window.said++).observe(node, {everything}); }}"
    )
    log(site, run, 61, loss=math.nan)
    page.wait("() => document.querySelector('#run-announced').textContent.startsWith('critical')")
    log(site, run, 62, loss=math.nan)
    page.wait("() => document.querySelector('#run-charts [data-name=loss] .plot').dataset.lastStep === '62'")
    page.page.wait_for_timeout(1000)
    assert page.page.evaluate("window.said") == 1


def test_data_wait_has_a_colour_only_where_the_verdict_speaks_of_it(
    site: ServerProcess, tab: OpenTab, run: str
) -> None:
    x = np.arange(1, 11)  # too few steps for a verdict
    send(site, run, {"loss": 1.0 / x, "step_time_s": 0.1 + 0.0 * x, "phase/data_s": 0.04 + 0.0 * x}, x)
    page = tab(f"/run/{run}")
    page.wait(f"() => {value('bottleneck')} === '40 %'")
    page.wait("() => document.querySelector('.verdict h2')")
    page.page.wait_for_timeout(500)
    for place in (".verdict", '[data-figure="bottleneck"]'):
        assert "warning" not in (page.page.locator(place).get_attribute("class") or "")


def test_small_lines_show_the_whole_run_while_a_part_of_it_is_zoomed(
    site: ServerProcess, tab: OpenTab, run: str
) -> None:
    record_run(site, run, steps=2000)
    page = tab(f"/run/{run}")
    line = "document.querySelector('[data-figure=\"loss\"] .sparkline')?.style.maskImage"
    page.wait(f"() => {line}")
    page.page.wait_for_timeout(1500)
    whole = page.page.evaluate(line)
    page.page.locator('.board .tools [data-value="100"]').click()
    page.page.wait_for_timeout(2500)
    assert page.page.evaluate(line) == whole


def test_a_run_that_starts_is_not_said_to_run(site: ServerProcess, tab: OpenTab, run: str) -> None:
    event = Event(kind="state", time=time.time(), step=0, data={"state": "starting"})
    send(site, run, {"host/cpu_pct": np.array([1.0])}, np.array([0]), events=[event])
    page = tab(f"/run/{run}")
    page.wait("() => document.querySelector('.run-head .state')")
    state = page.page.locator(".run-head .state").inner_text().split()[-1]
    assert state == "starting"
    assert "starting for" in page.page.locator(".facts").inner_text()
