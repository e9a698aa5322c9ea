"""A real server with recorded runs, and a real Chromium that notes everything it asks for and complains about."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from builders import ServerProcess, server_process
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

CANDIDATES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Each window would have a renderer of its own for the list below the address: a quarter of the time of opening a page.
# The others are those that Playwright turns off, whose list ours takes the place of.
PARTS_OFF = (
    "WebUIOmniboxPopup,WebUIOmniboxAimPopup,WebUIOmniboxFullPopup,AvoidUnnecessaryBeforeUnloadCheckSync,"
    "DestroyProfileOnBrowserClose,HttpsFirstBalancedModeAutoEnable,HttpsUpgrades,LensOverlay,MediaRouter,"
    "OptimizationHints,PaintHolding,ThirdPartyStoragePartitioning,Translate"
)
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
    "--disable-component-update",
    "--no-first-run",
    f"--disable-features={PARTS_OFF}",
]
NO_BROWSER = (
    "no Chromium found: install one (apt-get install chromium, or playwright install chromium), "
    "or name it: PERFAGENT_TEST_BROWSER=/path"
)
DRAWN = "n => [...document.querySelectorAll('.plot')].filter((plot) => Number(plot.dataset.points) >= 2).length >= n"


def find_chromium(playwright_path: str) -> str | None:
    named = os.environ.get("PERFAGENT_TEST_BROWSER")
    for candidate in ([named] if named else []) + list(CANDIDATES):
        found = shutil.which(candidate)
        if found:
            return found
    return playwright_path if Path(playwright_path).exists() else None


shared = contextlib.ExitStack()
"""Closes the browser and the server that all files of this folder share. They are not of the session: Playwright keeps
an event loop running, and tests of other folders begin theirs."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path.parent != item.path.parent:
            shared.close()
            for held in (chromium, one_context, server_of_pages):
                held.cache_clear()


@functools.cache
def chromium() -> Browser:
    playwright = shared.enter_context(sync_playwright())
    path = find_chromium(playwright.chromium.executable_path)
    if path is None:
        pytest.fail(NO_BROWSER, pytrace=False)
    launched = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
    shared.callback(launched.close)
    return launched


@functools.cache
def one_context() -> BrowserContext:
    """Of all pages that need no options of their own: it keeps their scripts compiled, and a load takes a quarter of
    the CPU."""
    return chromium().new_context()


@functools.cache
def server_of_pages() -> ServerProcess:
    folder = Path(shared.enter_context(tempfile.TemporaryDirectory()))
    return shared.enter_context(server_process(folder / "site"))


@pytest.fixture
def browser() -> Browser:
    return chromium()


@pytest.fixture
def site() -> ServerProcess:
    """One server for all tests of pages; each test brings a run of its own."""
    return server_of_pages()


@pytest.fixture
def run() -> str:
    return f"run-{uuid.uuid4().hex[:8]}"


@dataclass
class Tab:
    """A page, the hosts it asked, and what it complained about. expected: parts of complaints that belong to the test."""

    page: Page
    hosts: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.on("websocket", lambda socket: self._asked(socket.url))
        self.page.on(
            "console", lambda message: message.type in ("error", "warning") and self.complaints.append(message.text)
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _asked(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme in ("data", "blob"):
            return
        self.hosts.add(parts.hostname or url)
        self.requests.append(parts.path + (f"?{parts.query}" if parts.query else ""))

    def wait(self, expression: str, *, argument: Any = None, timeout_s: float = 30.0) -> Any:
        """Waits until the JavaScript expression is true in the page."""
        return self.page.wait_for_function(expression, arg=argument, timeout=timeout_s * 1000)

    def drawn(self, at_least: int) -> None:
        """Waits until so many charts have lines of at least two points."""
        self.wait(DRAWN, argument=at_least)

    def live(self) -> None:
        """Waits until the page has its WebSocket."""
        self.wait("() => document.getElementById('feed')?.classList.contains('live')", timeout_s=60)

    def check(self) -> None:
        assert self.hosts <= {"127.0.0.1"}, f"the page asked other hosts: {self.hosts}"
        left = [text for text in self.complaints if not any(part in text for part in self.expected)]
        assert left == [], "the page complained in its console"


LATE = """
const send = WebSocket.prototype.send;
WebSocket.prototype.send = function (text) {
  setTimeout(() => send.call(this, text), %d);
};
"""
OpenTab = Callable[..., Tab]


@pytest.fixture
def tab(browser: Browser, site: ServerProcess) -> Iterator[OpenTab]:
    """Opens a path in a tab that knows nothing of others; at the end nothing may have left this machine and nothing may
    be in the console."""
    contexts: list[BrowserContext] = []
    tabs: list[Tab] = []

    def open_tab(
        path: str,
        *,
        width: int = 1600,
        height: int = 2200,
        scheme: str = "light",
        server: ServerProcess | None = None,
        late_ms: int = 0,
        **more: Any,
    ) -> Tab:
        """late_ms: what the page asks for over its WebSocket reaches the server so late."""
        if more:
            contexts.append(browser.new_context(viewport={"width": width, "height": height}, **more))
        opened = Tab((contexts[-1] if more else one_context()).new_page())
        opened.page.set_viewport_size({"width": width, "height": height})
        opened.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        if late_ms:
            opened.page.add_init_script(LATE % late_ms)
        tabs.append(opened)
        opened.page.goto((server or site).url + path)
        return opened

    yield open_tab
    for opened in tabs:
        opened.check()
    for opened in tabs:
        opened.page.evaluate("() => localStorage.clear()")
        opened.page.close()
    for context in contexts:
        context.close()
