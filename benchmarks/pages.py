"""What a page of the dashboard weighs, how many requests it makes, and how long it takes to show its content: a first visit
with an empty cache, and a second one.

    PYTHONPATH=benchmarks:tests python benchmarks/pages.py [--beside CHECKOUT] [--quick] [--write]

The server holds the 337 runs and 1,046 alerts of fleet.py. Bytes are those on the wire, as Chromium's network events count them,
until two seconds after the content is there. Every visit opens a new page; the table shows medians. --beside: a second server
with the code of another checkout, whose pages are visited in turn.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import tables
from builders import ServerProcess, until
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
    Page("Compare, 20 runs", "/compare?runs=" + ",".join(f"sweep-{number:03}" for number in range(20)), ".headline"),
    Page("Alerts", "/alerts", ".alert.card"),
    Page("Settings", "/settings?tab=rules", ".mantine-Accordion-root"),
)


def visit(context: BrowserContext, url: str, ready: str) -> tuple[float, float, float]:
    """(seconds until the content is there, megabytes, requests)."""
    page = context.new_page()
    asked, received = set[str](), list[float]()
    events = context.new_cdp_session(page)
    events.send("Network.enable")
    # An icon in the style is no request, though Chromium counts it.
    events.on(
        "Network.requestWillBeSent",
        lambda event: asked.add(event["requestId"]) if event["request"]["url"].startswith("http") else None,
    )
    events.on(
        "Network.loadingFinished",
        lambda event: received.append(event["encodedDataLength"]) if event["requestId"] in asked else None,
    )
    begun = time.perf_counter()
    page.goto(url)
    page.wait_for_selector(ready)
    took = time.perf_counter() - begun
    page.wait_for_timeout(SETTLED_MS)
    page.close()
    return took, sum(received) / 1e6, len(received)


def visits(browser: Browser, url: str, page: Page) -> list[float]:
    """Seconds, megabytes and requests of a first visit, and of a second one."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    found = [figure for _ in range(2) for figure in visit(context, url + page.path, page.ready)]
    context.close()
    return found


def row(name: str, found: list[list[float]]) -> list[str]:
    medians = map(statistics.median, zip(*found, strict=True))
    return [name, *(form.format(value) for form, value in zip(FORMS * 2, medians, strict=True))]


@contextmanager
def serving(folder: Path, checkout: str) -> Iterator[ServerProcess]:
    """A server with the fleet, of this code or of another checkout."""
    packages = ":".join(f"{checkout}/{name}" for name in ("agent", "server", "client", "dashboard"))
    server = ServerProcess(folder, env={"PYTHONPATH": packages} if checkout else {}, forked=False)
    try:
        fleet(server.start())
        until(
            lambda: len(server.get("/alerts", state="firing", limit=1000)["alerts"]) >= min(1000, AT_ONCE),
            within_s=120.0,
        )
        yield server
    finally:
        server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", default="", metavar="CHECKOUT")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="perfagent-pages-") as folder, ExitStack() as stack:
        checkouts = {"": "", **({" (beside)": options.beside} if options.beside else {})}
        servers = {
            label: stack.enter_context(serving(Path(folder) / f"server{label}", checkout))
            for label, checkout in checkouts.items()
        }
        playwright = stack.enter_context(sync_playwright())
        named = os.environ.get("PERFAGENT_TEST_BROWSER")
        path = next(filter(None, map(shutil.which, [*([named] if named else []), *BROWSERS])), None)
        browser = playwright.chromium.launch(executable_path=path, args=["--headless", "--no-sandbox", "--disable-gpu"])
        rows = []
        for page in PAGES:
            found = [
                {label: visits(browser, server.url, page) for label, server in servers.items()}
                for _ in range(1 if options.quick else 5)
            ]
            rows += [row(f"{page.name}{label}", [one[label] for one in found]) for label in servers]
        browser.close()
    head = ["page", "first visit s", "MB", "requests", "second visit s", "MB", "requests"]
    text = f"{tables.machine()}. {ALL} runs; medians.\n\n{tables.table(head, rows)}"
    print(text)
    if options.write:
        tables.replace("pages", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
