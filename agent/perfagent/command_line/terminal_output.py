"""Output of commands: lines, tables and a progress bar.

On a terminal rich draws them, where it is installed: colors (not with NO_COLOR), columns that fit the width. Without
rich, and in a pipe or a file, the same words come as plain text; in a pipe no line is cut, so that grep finds
everything."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, Group

__all__ = ["CONTROL", "Line", "Screen", "Table", "agreed", "is_terminal", "plain_table", "somebody_can_answer"]

_GAP = "  "
_NARROWEST = 6
"""Columns keep so many characters."""
CONTROL = dict.fromkeys((*range(9), *range(10, 32), *range(127, 160)), "�")
"""Control characters but the tab: logged text must not steer its reader's terminal."""


@dataclass(frozen=True, slots=True)
class Line:
    """style: one of rich's, such as "bold red"; "" is plain."""

    text: str = ""
    style: str = ""


@dataclass(slots=True)
class Table:
    """Rows of texts below a head. right: the columns of figures. indent: blanks in front of each line. narrow: the
    columns that are cut where the terminal is too narrow; without any, all texts are."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int] = field(default_factory=tuple)
    indent: int = 0
    narrow: Sequence[int] = field(default_factory=tuple)

    def __len__(self) -> int:
        """Lines that it takes."""
        return len(self.rows) + 1


def is_terminal(stream: Any) -> bool:
    """Whether somebody looks, at something that can do more than print lines."""
    return hasattr(stream, "isatty") and stream.isatty() and os.environ.get("TERM") != "dumb"


def somebody_can_answer() -> bool:
    return is_terminal(sys.stdin) and is_terminal(sys.stderr)


def agreed(question: str) -> bool:
    """Asks the person at the terminal before something is done that cannot be taken back."""
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


class Screen:
    """width: of the terminal; None where lines stay whole. console: rich's, None without rich or a terminal."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.terminal = is_terminal(self.stream)
        self.width = shutil.get_terminal_size().columns if self.terminal else None
        self.console = _console(self.stream, self.width) if self.terminal else None

    def line(self, text: str = "", style: str = "") -> None:
        """One line, never folded: `wrapped` does that, where a text may be longer than the terminal is wide."""
        text = text.translate(CONTROL)
        if self.console is None:
            self.stream.write(text + "\n")
            self.stream.flush()
        else:
            self.console.print(text, style=style or None, soft_wrap=True)

    def lines(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self.line(line.text, line.style)

    def wrapped(self, text: str, indent: int = 0, hang: int = 0) -> list[str]:
        """A text in lines that fit the terminal, all behind `indent` blanks and those after the first behind `hang`
        more. A text of several lines stays so."""
        front, rest = " " * indent, " " * (indent + hang)
        if self.width is None:
            return [front + part for part in text.splitlines() or [""]]
        folded: list[str] = []
        for part in text.splitlines() or [""]:
            lines = textwrap.wrap(part, max(20, self.width - 1), initial_indent=front, subsequent_indent=rest)
            folded += lines or [front.rstrip()]
        return folded

    def table(self, table: Table) -> None:
        self.parts([table])

    def parts(self, parts: Iterable[Line | Table]) -> None:
        """A page of lines and tables, below each other. Lines are cut at the width of the terminal, so that none takes
        two."""
        self.lines(self._fitting(parts))

    def drawn(self, parts: Iterable[Line | Table]) -> Group:
        """The page as one of rich's renderables, to be redrawn."""
        from rich.console import Group
        from rich.text import Text

        return Group(*(Text(line.text.translate(CONTROL), style=line.style) for line in self._fitting(parts)))

    def _fitting(self, parts: Iterable[Line | Table]) -> Iterator[Line]:
        for part in parts:
            if isinstance(part, Table):
                head, *rows = plain_table(part, self.width)
                yield Line(head, "bold")
                yield from map(Line, rows)
            else:
                yield Line(part.text if self.width is None else _cut(part.text, self.width - 1), part.style)

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[_Bar]:
        """A bar that `move` fills; in a pipe a line for each tenth of the way."""
        bar = _Bar(self, label, max(1, total))
        try:
            yield bar
        finally:
            bar.close()


class _Bar:
    def __init__(self, screen: Screen, label: str, total: int) -> None:
        self._screen, self._label, self._total = screen, label, total
        self._tenth = -1

    def move(self, done: int, words: str = "") -> None:
        """done: of the total. words: what stands behind the bar."""
        done = min(done, self._total)
        tenth, text = 10 * done // self._total, f"{done:,}/{self._total:,}  {words}".rstrip()
        if self._screen.width is not None and self._screen.console is not None:
            bar = _cut(f"{self._label} {'━' * tenth:<10} {text}".translate(CONTROL), self._screen.width - 1)
            self._screen.stream.write(f"\r{bar}\x1b[K")
            self._screen.stream.flush()
        elif tenth > self._tenth:
            self._tenth = tenth
            self._screen.line(f"{self._label} {text}")

    def close(self) -> None:
        if self._screen.console is not None:
            self._screen.stream.write("\r\x1b[K")


def plain_table(table: Table, width: int | None = None) -> list[str]:
    """The table as text, no wider than `width`; None leaves every cell whole."""
    return ["".join(row).rstrip() for row in _cells(table, width)]


def _cells(table: Table, width: int | None) -> list[list[str]]:
    """The head and the rows, every cell as wide as its column, with what is between columns. The widest of the columns
    that may be cut is, until the lines fit; where that is not enough, the last columns are left out."""
    rows = [list(table.head), *(list(row) for row in table.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.head))]
    may = list(table.narrow) or [column for column in range(len(widths)) if column not in table.right]

    def too_wide() -> bool:
        return width is not None and table.indent + sum(widths) + len(_GAP) * (len(widths) - 1) >= width

    while too_wide() and any(widths[column] > _NARROWEST for column in may):
        widths[max(may, key=lambda column: widths[column])] -= 1
    while too_wide() and len(widths) > 1:
        widths.pop()
    front = [" " * table.indent] + [_GAP] * (len(widths) - 1)
    return [
        [
            front[column] + _fitted(cell, widths[column], right=column in table.right)
            for column, cell in enumerate(row[: len(widths)])
        ]
        for row in rows
    ]


def _fitted(cell: str, width: int, *, right: bool) -> str:
    cut = _cut(cell, width).translate(CONTROL)
    return cut.rjust(width) if right else cut.ljust(width)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _console(stream: IO[str], width: int | None) -> Console | None:
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)
