"""A real server with recorded runs, and the terminal application without a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import html
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from builders import ServerProcess, server_process, until
from recorded import log, send, training
from textual.pilot import Pilot

from perfagent.wire import Event
from perfagent_client.watch.app import WatchApp

_TEXT = r'<text class="terminal-[^"]*-r\d+" x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>'
_CELL = 12.2
"""Of the picture, a character is so wide."""


def end(steps: int) -> Event:
    return Event(kind="state", step=steps, time=time.time(), data={"state": "finished"})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A run that is healthy, one that met a NaN, and one that goes on."""
    with server_process(tmp_path_factory.mktemp("watch")) as running:
        steps = np.arange(1, 201)
        send(running, "fine", training(steps), steps, name="fine [b]run[/b]", events=[end(200)])
        ill = training(np.arange(1, 41))
        ill["loss"][30:] = np.nan
        said = {"lines": ["epoch 1", "\x1b[31mred"], "stream": "stdout"}
        console = Event(kind="log", step=40, time=time.time(), data=said)
        send(running, "ill", ill, np.arange(1, 41), name="ill run", events=[console, end(40)])
        log(running, "going", 7, train__loss=1.5)
        until(lambda: running.get("/alerts", state="firing")["alerts"], why="the NaN raised no alert")
        yield running


@dataclass
class Terminal:
    app: WatchApp
    pilot: Pilot[None]

    @property
    def text(self) -> str:
        """What is on the screen, a line a row."""
        rows: dict[float, str] = {}
        for x, y, text in re.findall(_TEXT, self.app.export_screenshot()):
            column = round(float(x) / _CELL)
            rows[float(y)] = rows.get(float(y), "").ljust(column) + html.unescape(text).replace("\xa0", " ")
        return "\n".join(rows[y] for y in sorted(rows))

    async def until(self, condition: Callable[[str], Any], *, within_s: float = 20.0) -> str:
        """The text of the screen once it is so."""
        loop = asyncio.get_running_loop()
        last = loop.time() + within_s
        while not condition(text := self.text):
            assert loop.time() < last, f"it never came to that:\n{text}"
            await self.pilot.pause(0.1)
        return text

    async def shows(self, *parts: str) -> str:
        return await self.until(lambda text: all(part in text for part in parts))


@pytest.fixture
def opened(site: ServerProcess) -> Callable[..., contextlib.AbstractAsyncContextManager[Terminal]]:
    @contextlib.asynccontextmanager
    async def terminal(
        server: ServerProcess = site, *, columns: int = 140, rows: int = 24, key: str = "", **options: Any
    ) -> AsyncIterator[Terminal]:
        app = WatchApp(server.url, key or server.admin_token, **options)
        async with app.run_test(size=(columns, rows), notifications=True) as pilot:
            yield Terminal(app, pilot)

    return terminal
