"""Widgets that the screens share: text that is drawn for its width, the line at the top, dialogs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult, RenderResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, Static

from perfagent_client.watch.feed import Link
from perfagent_client.watch.words import clean, cut

__all__ = ["Ask", "Head", "Help", "Lines"]

Draw = Callable[[int], list[Text]]
"""Width -> lines, none of them longer."""


class Lines(Widget):
    """As high as its lines, which are made anew for each width."""

    DEFAULT_CSS = "Lines { height: auto; }"

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self._draw = draw

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002 - textual's signature
        return len(self._draw(width))

    def render(self) -> RenderResult:
        return Text("\n", no_wrap=True).join(self._draw(self.content_size.width))

    def changed(self) -> None:
        self.refresh(layout=True)


class Head(Static):
    """What this is, and how it is kept up to date."""

    DEFAULT_CSS = "Head { dock: top; height: 1; text-style: reverse; }"

    def __init__(self, title: str) -> None:
        super().__init__()
        self.head_title, self._link = title, Link("connecting")

    def tell(self, link: Link) -> None:
        self._link = link
        self.refresh()

    def call_it(self, title: str) -> None:
        self.head_title = title
        self.refresh()

    @property
    def words(self) -> str:
        link = self._link
        if link.kind == "stale":
            since = time.strftime("%H:%M", time.localtime(link.since))
            return f"stale since {since}" + (f": {clean(link.trouble)}" if link.trouble else "")
        return "polling (no WebSocket)" if link.kind == "polling" else link.kind

    def render(self) -> RenderResult:
        width = self.size.width
        right = cut(self.words, width // 2)
        left = cut(self.head_title, max(0, width - len(right) - 3))
        return Text(f" {left}".ljust(width - len(right) - 1) + right + " ", no_wrap=True)


class _Dialog(ModalScreen[str | None]):
    DEFAULT_CSS = """
    _Dialog { align: center middle; background: $background 0%; }
    _Dialog > Vertical { width: 90%; max-width: 72; height: auto; border: round $primary; padding: 0 1; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss_none", "cancel")]

    def action_dismiss_none(self) -> None:
        self.dismiss(None)


class Ask(_Dialog):
    """A line of text; None where it was left with Escape."""

    def __init__(self, question: str, placeholder: str) -> None:
        super().__init__()
        self._question, self._placeholder = question, placeholder

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Text(clean(self._question)))
            yield Input(placeholder=self._placeholder, max_length=2000)
            yield Static(Text("Enter: do it   Escape: leave it", style="dim"))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip())


class Help(_Dialog):
    """The keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("question_mark,q,enter", "dismiss_none", "close", show=False)]
    KEYS = (
        ("↑ ↓ PgUp PgDn", "move; j and k do it too"),
        ("Enter", "open the run"),
        ("Escape", "back to all runs, or clear the filter"),
        ("/", "filter: words of name, project, tag, host, state, severity or verdict"),
        ("a", "acknowledge the run's open alert, with a note: somebody works on it"),
        ("m", "mute that alert's rule in this run for an hour; again ends it"),
        ("u", "undo the last of these"),
        ("? / q", "this help / quit"),
    )

    def compose(self) -> ComposeResult:
        text = Text()
        for keys, what in self.KEYS:
            text.append(f"{keys:<14}", style="bold")
            text.append(f" {what}\n")
        with Vertical():
            yield Static(text)
            yield Static(
                Text(
                    "✕ critical  ▲ warning  ● note  ✓ healthy  ○ unknown. What needs somebody is at the top.",
                    style="dim",
                )
            )
