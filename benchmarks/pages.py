"""What a page of the dashboard weighs, and how long it takes to show its content: a first visit with an empty cache, and a
second one.

    PYTHONPATH=benchmarks:tests python benchmarks/pages.py [--quick] [--write]

The server holds 300 runs, one of them with a NaN. Bytes are those on the wire, as Chromium's network events count them,
until two seconds after the content is there. Every visit opens a new page; the table shows medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tables
from builders import server_process, until
from playwright.sync_api import Browser, BrowserContext, sync_playwright
from recorded import log, record_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
RUNS = 300
SETTLED_MS = 2000


@dataclass(frozen=True)
class Page:
    """ready: what is on the page once its content is."""

    name: str
    path: str
    ready: str


PAGES = (
    Page("Overview", "/", ".alert.card"),
    Page("Runs", "/runs", ".ag-row .cell-run"),
    Page("a run", "/run/run-0", "#run-charts .plot[data-points]"),
    Page("Compare", "/compare?runs=run-0,run-1", ".headline"),
    Page("Alerts", "/alerts", ".alert.card"),
    Page("Settings", "/settings?tab=rules", ".mantine-Accordion-root"),
)


def visit(context: BrowserContext, url: str, ready: str) -> tuple[float, float]:
    """(seconds until the content is there, megabytes)."""
    page = context.new_page()
    received = [0.0]
    events = context.new_cdp_session(page)
    events.send("Network.enable")
    events.on(
        "Network.loadingFinished", lambda event: received.__setitem__(0, received[0] + event["encodedDataLength"])
    )
    begun = time.perf_counter()
    page.goto(url)
    page.wait_for_selector(ready)
    took = time.perf_counter() - begun
    page.wait_for_timeout(SETTLED_MS)
    page.close()
    return took, received[0] / 1e6


def measured(browser: Browser, url: str, page: Page, times: int) -> list[str]:
    first, second = [], []
    for _ in range(times):
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        first.append(visit(context, url + page.path, page.ready))
        second.append(visit(context, url + page.path, page.ready))
        context.close()
    medians = [statistics.median(one[at] for one in visits) for visits in (first, second) for at in (0, 1)]
    return [page.name, *(f"{value:.2f}" if at % 2 == 0 else f"{value:.3f}" for at, value in enumerate(medians))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="perfagent-pages-") as folder,
        server_process(Path(folder) / "server") as server,
        sync_playwright() as playwright,
    ):
        for number in range(RUNS):
            record_run(server, f"run-{number}", steps=400 if number < 2 else 40)
        log(server, "run-7", 41, loss=float("nan"))
        until(lambda: server.get("/alerts", state="firing")["alerts"], within_s=60.0)
        named = os.environ.get("PERFAGENT_TEST_BROWSER")
        path = next(filter(None, map(shutil.which, [*([named] if named else []), *BROWSERS])), None)
        browser = playwright.chromium.launch(executable_path=path, args=["--headless", "--no-sandbox", "--disable-gpu"])
        rows = [measured(browser, server.url, page, 1 if options.quick else 5) for page in PAGES]
        browser.close()
    head = ["page", "first visit s", "MB", "second visit s", "MB"]
    text = f"{tables.machine()}. {RUNS} runs; medians.\n\n{tables.table(head, rows)}"
    print(text)
    if options.write:
        tables.replace("pages", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
