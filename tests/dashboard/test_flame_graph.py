"""The flame graph of a profile on the Time tab, and its trace handed to Perfetto."""

from __future__ import annotations

import gzip
import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from builders import ServerProcess
from recorded import send

from perfagent.wire import Event

if TYPE_CHECKING:
    from conftest import OpenTab

pytestmark = pytest.mark.browser

# As Perfetto's page: it answers a PING, and keeps what it is given.
PERFETTO = """<script>
addEventListener("message", (event) => {
  if (event.data === "PING") event.source.postMessage("PONG", event.origin);
  else if (event.data.perfetto) window.given = [event.data.perfetto.fileName, event.data.perfetto.buffer.byteLength];
});
</script>"""


def block(name: str, ts: int, dur: int, tid: int, cat: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}


def profiled(site: ServerProcess, run: str) -> int:
    """A run with one profile; the bytes of its trace."""
    blocks = [
        block("ProfilerStep#4", 0, 1000, 1), block("aten::linear", 0, 600, 1), block("aten::addmm", 100, 400, 1),
        block("gemm<float>", 200, 500, 7, "kernel"),
    ]  # fmt: skip
    trace = gzip.compress(json.dumps({"traceEvents": blocks}).encode())
    about = {"profile": "ab12", "parts": 1}
    cut = {"key": "cut_short_evaluation", "whole": 1, "of": 50}
    summary = {**about, "command": "cm_1", "first_step": 4, "last_step": 4, "cut": cut}
    events = [
        Event(kind="profile", time=time.time(), step=4, data=data)
        for data in (summary, {**about, "part": 1, "payload": trace})
    ]
    send(site, run, {"loss": np.ones(5), "step_time_s": np.ones(5)}, np.arange(1, 6), events=events)
    return len(trace)


def test_a_flame_graph_has_names_times_and_threads(site: ServerProcess, tab: OpenTab, run: str) -> None:
    size = profiled(site, run)
    page = tab(f"/run/{run}?tab=time", locale="en-US")
    drawn = "document.querySelector('.flame-plot.js-plotly-plot')?.data[0]"
    page.wait(f"() => {drawn}")
    found = page.page.evaluate(
        f"() => ({{ labels: {drawn}.labels, parents: {drawn}.parents, told: {drawn}.customdata }})"
    )
    assert found["labels"] == ["ProfilerStep", "aten::linear", "aten::addmm"]
    assert found["parents"] == ["", "0", "1"]
    assert found["told"][2] == ["400 µs", "40", "1"]
    assert "cut short before an evaluation: 1 of 50 steps" in page.page.locator(".profile").inner_text()
    page.page.get_by_label("Thread").select_option("1")
    page.wait(f"() => {drawn}.labels[0] === 'gemm‹float›'")

    page.page.context.route(
        "https://ui.perfetto.dev/**", lambda route: route.fulfill(body=PERFETTO, content_type="text/html")
    )
    button = page.page.get_by_role("button", name="Open in Perfetto")
    assert "not our site" in str(button.get_attribute("title"))
    with page.page.context.expect_page() as opened:
        button.click()
    opened.value.wait_for_function("() => window.given")
    assert opened.value.evaluate("window.given") == [f"{run}, steps 4–4, rank 0.json.gz", size]
    opened.value.close()
