"""What a page of the dashboard weighs, how many requests it makes, and how long it takes to show its content: a first visit
with an empty cache, and a second one.

    PYTHONPATH=benchmarks:tests python benchmarks/pages.py [--quick] [--write]

The server holds the 337 runs and 1,046 alerts of fleet.py. Bytes are those on the wire, as Chromium's network events count them,
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
from fleet import ALL, AT_ONCE, fleet
from playwright.sync_api import Browser, BrowserContext, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SETTLED_MS = 2000
FORMS = ("{:.2f}", "{:.3f}", "{:.0f}")


@dataclass(frozen=True)
class Page:
    """ready: what is on the page once its content is."""

    name: str
    path: str
    ready: str


PAGES = (
    Page("Overview", "/", ".alert.card"),
    Page("Runs", "/runs", ".ag-row .cell-run"),
    Page("a run", "/run/nan-0", "#run-charts .plot[data-points]"),
    Page("Compare", "/compare?runs=sweep-000,sweep-001", ".headline"),
    Page("Alerts", "/alerts", ".alert.card"),
    Page("Settings", "/settings?tab=rules", ".mantine-Accordion-root"),
)


def visit(context: BrowserContext, url: str, ready: str) -> tuple[float, float, float]:
    """(seconds until the content is there, megabytes, requests)."""
    page = context.new_page()
    received: list[float] = []
    events = context.new_cdp_session(page)
    events.send("Network.enable")
    events.on("Network.loadingFinished", lambda event: received.append(event["encodedDataLength"]))
    begun = time.perf_counter()
    page.goto(url)
    page.wait_for_selector(ready)
    took = time.perf_counter() - begun
    page.wait_for_timeout(SETTLED_MS)
    page.close()
    return took, sum(received) / 1e6, len(received)


def measured(browser: Browser, url: str, page: Page, times: int) -> list[str]:
    first, second = [], []
    for _ in range(times):
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        first.append(visit(context, url + page.path, page.ready))
        second.append(visit(context, url + page.path, page.ready))
        context.close()
    medians = [statistics.median(one[at] for one in visits) for visits in (first, second) for at in range(3)]
    return [page.name, *(form.format(value) for form, value in zip(FORMS * 2, medians, strict=True))]


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
        fleet(server)
        until(lambda: server.get("/alerts/inbox")["counts"]["open"] >= AT_ONCE, within_s=120.0)
        named = os.environ.get("PERFAGENT_TEST_BROWSER")
        path = next(filter(None, map(shutil.which, [*([named] if named else []), *BROWSERS])), None)
        browser = playwright.chromium.launch(executable_path=path, args=["--headless", "--no-sandbox", "--disable-gpu"])
        rows = [measured(browser, server.url, page, 1 if options.quick else 5) for page in PAGES]
        browser.close()
    head = ["page", "first visit s", "MB", "requests", "second visit s", "MB", "requests"]
    text = f"{tables.machine()}. {ALL} runs; medians.\n\n{tables.table(head, rows)}"
    print(text)
    if options.write:
        tables.replace("pages", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
