"""One run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Footer, Static

from perfagent.wire import Alert
from perfagent_client.watch import run_text
from perfagent_client.watch.live_screen import LiveScreen
from perfagent_client.watch.parts import Head, Lines
from perfagent_client.watch.run_reader import read_run
from perfagent_client.watch.run_view import RunView
from perfagent_client.watch.session import Session

__all__ = ["RunScreen"]

_AGAIN_EVERY_S = 3.0
"""Figures, curves and console, which the WebSocket does not tell."""
_CONSOLE = 12


class RunScreen(LiveScreen):
    DEFAULT_CSS = """
    RunScreen Lines { margin: 0 1 1 1; }
    RunScreen .title { height: 1; padding: 0 1; text-style: bold underline; }
    RunScreen Horizontal { height: auto; }
    RunScreen Vertical { height: auto; width: 1fr; }
    RunScreen.-narrow Horizontal { layout: vertical; }
    RunScreen.-narrow Vertical { width: 100%; }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]  # noqa: RUF012 - as textual declares it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace", "app.close_run", "all runs"),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
    ]

    def __init__(self, session: Session, run: str) -> None:
        super().__init__(session, RunView.subscription(run))
        self.run_id = run
        self.view: RunView | None = None

    def compose(self) -> ComposeResult:
        yield Head(f"perfagent  {self.run_id}")
        with VerticalScroll():
            yield self._lines(lambda view, width: run_text.head_lines(view, width, self.session.clock()))
            yield self._lines(run_text.verdict_lines)
            with Horizontal():
                with Vertical():
                    yield Static("Progress", classes="title")
                    yield self._lines(
                        lambda view, width: run_text.curve_lines(view, width) + run_text.figure_lines(view, width)
                    )
                    yield Static("Where a step goes", classes="title")
                    yield self._lines(run_text.step_lines)
                with Vertical():
                    yield Static("Alerts", classes="title")
                    yield self._lines(run_text.alert_lines)
                    yield Static("Console", classes="title")
                    yield self._lines(lambda view, width: run_text.console_lines(view, width, _CONSOLE))
        yield Footer(show_command_palette=False)

    def _lines(self, draw: Callable[[RunView, int], list[Text]]) -> Lines:
        return Lines(lambda width: [Text("…")] if self.view is None else draw(self.view, width))

    def on_mount(self) -> None:
        self.set_interval(_AGAIN_EVERY_S, self._look_again)
        self.query_one(VerticalScroll).focus()

    async def fetch(self) -> None:
        self.view = await read_run(self.session.client, self.run_id)
        self.query_one(Head).call_it(f"perfagent  {self.view.run.name}")
        self.draw()

    def take(self, message: dict[str, Any]) -> None:
        if self.view is not None and self.view.take(message):
            self.start(self.again)
        self.draw()

    def _look_again(self) -> None:
        """A slow server is not asked again before it has answered."""
        if not self.is_fetching:
            self.start(self.again)

    def draw(self) -> None:
        for part in self.query(Lines):
            part.changed()

    def firing(self) -> Iterable[Alert]:
        return self.view.firing if self.view else ()

    def action_scroll(self, by: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)
