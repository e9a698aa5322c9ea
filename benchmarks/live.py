"""What a live page costs, and how late it is: WebSocket messages and bytes while a job trains, the time from sending a point
to the frame in which Chromium has painted it, and the CPU time of the page's main thread.

    PYTHONPATH=benchmarks:tests python benchmarks/live.py [--seconds 30] [--quick] [--write]

The subscription is that of the run page: bands over ranks of every series of the run. The latency is measured on a real
page, with the clock of this machine on both ends: from before the POST of one row of twelve series until after the
first frame in which the chart of the loss shows its step. Rows come at intervals that no tick of the server or the page
divides. The CPU time is that of a page of 20 series, of which a row comes every 0.5 s.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import tables
import websockets
from builders import ServerProcess, job_environment, server_process, until
from playwright.sync_api import CDPSession, Page, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SERIES = (
    "loss", "lr", "step_time_s", "samples_per_s", "tokens_per_s", "grad/norm", "phase/data_s", "phase/forward_s", "a", "b", "c",
    "d",
)  # fmt: skip
# Notes when the frame after the one that drew a step has begun: then the step is on the screen.
WATCH = """() => {
  const plot = document.querySelector('.chart[data-name="loss"] .plot');
  window.painted = {};
  new MutationObserver(() => {
    const step = plot.dataset.lastStep;
    requestAnimationFrame(() => { window.painted[step] ??= performance.timeOrigin + performance.now(); });
  }).observe(plot, { attributes: true, attributeFilter: ["data-last-step"] });
}"""
JOB = Path(__file__).resolve().with_name("nan_job.py")


async def listen(server: ServerProcess, run: str, seconds: float) -> tuple[int, int, int]:
    """(messages, bytes, points) that a page receives."""
    messages = received = points = 0
    async with websockets.connect(server.url.replace("http", "ws") + "/ws/live", proxy=None, max_size=None) as socket:
        await socket.send(json.dumps({"subscribe": {"runs": [run], "names": [], "bands": True}}))
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                message = await asyncio.wait_for(socket.recv(), left)
            except TimeoutError:
                break
            messages += 1
            received += len(message if isinstance(message, bytes) else message.encode())
            content = json.loads(message)
            points += sum(len(item["step"]) for kind in ("samples", "bands") for item in content.get(kind, ()))
    return messages, received, points


@contextmanager
def browser_page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        named = os.environ.get("PERFAGENT_TEST_BROWSER")
        path = next(filter(None, map(shutil.which, [*([named] if named else []), *BROWSERS])), None)
        browser = playwright.chromium.launch(executable_path=path, args=["--headless", "--no-sandbox", "--disable-gpu"])
        yield browser.new_page(viewport={"width": 1600, "height": 1000})
        browser.close()


def core_share(server: ServerProcess, seconds: float) -> float:
    """CPU time of the page's main thread by wall time, while 20 series arrive at 2 Hz."""
    names = [*SERIES, *(f"m/{letter}" for letter in "efghijkl")]
    stopped = threading.Event()

    def row(step: int) -> dict[str, Any]:
        return {"run": "cores", "step": step, "metrics": dict.fromkeys(names, 1.0 + step * 7919 % 13 / 13)}

    def send() -> None:
        with httpx.Client(trust_env=False, base_url=server.url) as http:
            http.post("/api/v1/log", json=[row(step) for step in range(400)]).raise_for_status()
            for step in itertools.count(400):
                if stopped.wait(0.5):
                    return
                http.post("/api/v1/log", json=row(step)).raise_for_status()

    sender = threading.Thread(target=send)
    sender.start()
    try:
        run = until(lambda: server.get("/runs", name="cores")["runs"], within_s=30.0)[0]["run"]
        with browser_page() as page:
            page.goto(f"{server.url}/run/{run}")
            page.wait_for_selector(".chart .plot[data-points]")
            page.wait_for_timeout(6000)
            events = page.context.new_cdp_session(page)
            events.send("Performance.enable", {"timeDomain": "threadTicks"})
            before = _task_s(events)
            page.wait_for_timeout(1000 * seconds)
            return (_task_s(events) - before) / seconds
    finally:
        stopped.set()
        sender.join()


def _task_s(events: CDPSession) -> float:
    found = events.send("Performance.getMetrics")["metrics"]
    return next(float(one["value"]) for one in found if one["name"] == "TaskDuration")


def latencies(server: ServerProcess, count: int) -> list[float]:
    """Seconds from sending a row to having it painted, sorted; for each of `count` rows."""
    with browser_page() as page, httpx.Client(trust_env=False) as http:

        def send(step: int) -> float:
            metrics = dict.fromkeys(SERIES, 1.0 + (step % 7) / 10)
            begun = time.time()
            row = {"run": "latency", "step": step, "metrics": metrics}
            http.post(f"{server.url}/api/v1/log", json=row).raise_for_status().json()
            return begun

        for step in range(1, 31):
            send(step)
        run = http.get(f"{server.url}/api/v1/runs", params={"name": "latency"}).json()["runs"][0]["run"]
        page.goto(f"{server.url}/run/{run}")
        page.wait_for_function("() => document.getElementById('feed')?.classList.contains('live')")
        page.wait_for_function(
            "() => Number(document.querySelector('.chart[data-name=\"loss\"] .plot')?.dataset.points) >= 2"
        )
        page.evaluate(WATCH)
        rows = zip(range(31, 41 + count), itertools.cycle(PAUSES_S), strict=False)
        took = [_one(page, send, step, pause) for step, pause in rows]
        return sorted(took[10:])  # the first ones also wait for the page to settle


PAUSES_S = (0.13, 0.31, 0.57, 0.19, 0.43)


def _one(page: Page, send: Callable[[int], float], step: int, pause: float) -> float:
    page.wait_for_timeout(1000 * pause)
    begun = send(step)
    painted = page.wait_for_function(
        "(step) => window.painted[step]", arg=step, timeout=30_000, polling=50
    ).json_value()
    return float(painted) / 1000 - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    seconds = options.seconds or (8.0 if options.quick else 30.0)
    with (
        tempfile.TemporaryDirectory(prefix="perfagent-live-") as folder,
        server_process(Path(folder) / "server") as server,
    ):
        variables = job_environment(Path(folder), PERFAGENT_SERVER=server.url, PERFAGENT_RUN_ID="live")
        job = subprocess.Popen([sys.executable, str(JOB), "1000000", "0"], env=variables, stdout=subprocess.DEVNULL)
        try:
            until(lambda: (server.find("/runs/live") or {"step": 0})["step"], within_s=60.0)
            before = server.get("/runs/live")["step"]
            messages, received, points = asyncio.run(listen(server, "live", seconds))
            steps = server.get("/runs/live")["step"] - before
        finally:
            job.terminate()
            job.wait()
        late = latencies(server, 30 if options.quick else 100)
        cores = core_share(server, seconds)
    text = (
        f"{tables.machine()}. One page on a run of {steps / seconds:.0f} steps per second, all its series subscribed: "
        f"{messages / seconds:.1f} WebSocket messages and {received / seconds / 1000:.1f} kB per second, "
        f"{received / max(1, messages) / 1000:.2f} kB per message, {received / max(1, points):.1f} bytes per point (before "
        "the WebSocket's own compression). "
        "No figure is polled.\n\n"
        f"From sending a row of {len(SERIES)} series (`POST /log`, one every 0.1 to 0.6 s) to its step painted in Chromium, on "
        f"the same machine: median {late[len(late) // 2]:.2f} s, nine of ten within {late[9 * len(late) // 10]:.2f} s, slowest "
        f"{late[-1]:.2f} s of {len(late)}. While 20 series arrive at 2 Hz, the page's main thread takes {cores:.3f} of a core."
    )
    print(text)
    if options.write:
        tables.replace("live", text)
    return 0 if messages and points else 1


if __name__ == "__main__":
    sys.exit(main())
