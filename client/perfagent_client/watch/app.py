"""The terminal application: the table of runs below, a run on top of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from textual import on
from textual.app import App
from textual.binding import Binding, BindingType

from perfagent.endpoint.admin_proof import AdminProof
from perfagent_client.client import AsyncClient
from perfagent_client.watch.fleet_screen import FleetScreen
from perfagent_client.watch.run_screen import RunScreen
from perfagent_client.watch.session import Session

__all__ = ["WatchApp"]


_ANSWER_S = 8.0
"""Of a server that stands still nothing comes; whoever watches wants to know that soon."""


class WatchApp(App[None]):
    """run: the id of the one to open at the start. clock: Unix seconds."""

    TITLE = "perfagent"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "quit", show=False, priority=True)]

    def __init__(
        self,
        server: str,
        api_key: str | AdminProof | None = None,
        *,
        run: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self.theme = "ansi-dark"  # the terminal's own colors, on its own background
        self._server, self._api_key, self._run_id, self._clock = server, api_key, run, clock

    def on_mount(self) -> None:
        client = AsyncClient(self._server, self._api_key)
        client.http.timeout = _ANSWER_S
        self.session = Session(client, self._clock)
        self.push_screen(FleetScreen(self.session))
        if self._run_id is not None:
            self.open_run(self._run_id)

    def open_run(self, run: str) -> None:
        self.push_screen(RunScreen(self.session, run))

    @on(FleetScreen.Opened)
    def _opened(self, event: FleetScreen.Opened) -> None:
        self.open_run(event.run)

    def action_close_run(self) -> None:
        if isinstance(self.screen, RunScreen):
            self.pop_screen()

    async def on_unmount(self) -> None:
        await self.session.close()
