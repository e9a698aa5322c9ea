"""The table of all runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.message import Message
from textual.widgets import DataTable, Footer, Input, Static

from perfagent.errors import PerfagentError
from perfagent.wire import STATE_SHAPES, Alert
from perfagent.wire.quantities import figure, some
from perfagent_client.sparkline import sparkline
from perfagent_client.watch.fleet import LOSSES, RATES, Fleet, FleetRow
from perfagent_client.watch.fleet_reader import CURVE, FleetReader
from perfagent_client.watch.live_screen import LiveScreen
from perfagent_client.watch.parts import Head
from perfagent_client.watch.session import Session
from perfagent_client.watch.words import MARKS, SEVERITY_STYLES, age, cut, newest, seconds_of

__all__ = ["FleetScreen"]

_EMPTY = "No run has reported yet. `perfagent run train.py` starts one; it appears here by itself."
_DRAWN_EVERY_S = 1.0
_ROWS_EVERY_S = 5.0
_PADDING = 2
"""Of a column, left and right together."""
_LEAST = 6
"""Of the columns whose width is not fixed."""


@dataclass(frozen=True, slots=True)
class Column:
    """from_width: of a terminal so wide; width 0: what is left."""

    key: str
    head: str
    width: int
    cell: Callable[[FleetRow, float], Text]
    from_width: int = 0
    right: bool = False


def _severity(row: FleetRow, _: float) -> Text:
    return Text(f"{MARKS.get(row.severity, '●')} {row.severity}", style=SEVERITY_STYLES.get(row.severity, ""))


def _state(row: FleetRow, _: float) -> Text:
    return Text(f"{STATE_SHAPES.get(row.run.state, '●')} {row.run.state}", style="dim" if row.has_ended else "")


def _title(row: FleetRow, _: float) -> Text:
    alert = row.worst
    taken = alert is None or alert.acknowledged or alert.muted_until
    return Text(row.title, style="dim" if taken else "")


def _rate(row: FleetRow, _: float) -> Text:
    return Text("" if row.rate is None else figure(*row.rate))


def _seen(row: FleetRow, now: float) -> Text:
    heard = seconds_of(row.run.updated)
    return Text("" if heard is None else age(max(0.0, now - heard)))


COLUMNS = (
    Column("severity", "", 10, _severity),
    Column("state", "state", 10, _state, 70),
    Column("run", "run", 0, lambda row, _: Text(row.run.name, style="bold")),
    Column("verdict", "verdict", 0, _title),
    Column("step", "step", 9, lambda row, _: Text(f"{row.run.step:,}"), right=True),
    Column("rate", "throughput", 15, _rate, 120, right=True),
    Column("loss", "loss", 8, lambda row, _: Text(newest("loss", row.loss)), 100, right=True),
    Column("curve", "whole run", CURVE, lambda row, _: Text(sparkline(row.curve, CURVE), style="cyan"), 130),
    Column("seen", "seen", 6, _seen, 78, right=True),
)


def columns_for(width: int, longest_name: int) -> list[tuple[Column, int]]:
    """Those that fit a terminal, with their widths. Names get what they need, but at most two fifths of what the others
    leave; the verdict gets the rest."""
    shown = [column for column in COLUMNS if width >= column.from_width]
    left = width - sum(column.width + _PADDING for column in shown)
    for_name = max(_LEAST, min(longest_name, 2 * left // 5))
    widths = {"run": for_name, "verdict": max(_LEAST, left - for_name)}
    return [(column, column.width or widths[column.key]) for column in shown]


class FleetScreen(LiveScreen):
    class Opened(Message):
        """Somebody wants to see a run."""

        def __init__(self, run: str) -> None:
            super().__init__()
            self.run = run

    DEFAULT_CSS = """
    FleetScreen DataTable { height: 1fr; overflow-x: hidden; }
    FleetScreen #empty { height: auto; padding: 1 2; dock: top; margin-top: 2; }
    FleetScreen Input { display: none; dock: bottom; height: 1; border: none; padding: 0 1; margin-bottom: 1; }
    FleetScreen Input.open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("escape", "clear", "clear", show=False),
        Binding("j", "move(1)", show=False),
        Binding("k", "move(-1)", show=False),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__(session, {"fleet": True, "names": [*LOSSES, *RATES]})
        self.fleet = Fleet()
        self._reader = FleetReader(session.client, self.fleet)
        self._filter = ""
        self._is_reading = False
        self._shown: list[str] = []
        self._columns: list[tuple[Column, int]] = []

    def compose(self) -> ComposeResult:
        yield Head("perfagent")
        yield DataTable(cursor_type="row", zebra_stripes=False, cell_padding=_PADDING // 2)
        yield Static(id="empty")
        yield Input(placeholder="words: name, project, tag, host, state, severity, verdict", id="filter")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.set_interval(_DRAWN_EVERY_S, lambda: self.draw() if self.is_current else None)
        self.set_interval(_ROWS_EVERY_S, self._read_rows)
        self.query_one(DataTable).focus()

    # ------------------------------------------------------------------------------------------------------- what comes

    async def fetch(self) -> None:
        await self._reader.read_list()
        self.draw()
        await self._reader.read_rows(self._in_sight())
        self.draw()

    def take(self, message: dict[str, Any]) -> None:
        if self.fleet.take(message):
            self.start(self.again)
        elif "alert" in message:
            self.draw()

    def _read_rows(self) -> None:
        """Not while the answers to the last questions are awaited, nor below a run's screen."""
        if self.is_current and not self._is_reading:
            self.start(self._rows_again)

    async def _rows_again(self) -> None:
        self._is_reading = True
        try:
            await self._reader.read_rows(self._in_sight())
        except PerfagentError as error:  # the feed tells that the server is away
            self.log(error)
        finally:
            self._is_reading = False

    @property
    def _is_closing(self) -> bool:
        """A screen that closes loses its parts before its workers end."""
        return not self.query(DataTable)

    def _in_sight(self) -> list[FleetRow]:
        """Those on the screen, and a few more."""
        if self._is_closing:
            return []
        table = self.query_one(DataTable)
        first = max(0, round(table.scroll_y))
        keys = self._shown[first : first + max(10, self.size.height) + 5]
        return [self.fleet.rows[key] for key in keys if key in self.fleet.rows]

    # ------------------------------------------------------------------------------------------------------ what is shown

    @on(Resize)
    def _resized(self) -> None:
        self.draw()

    def draw(self) -> None:
        """Rows in their order; the cursor stays on its run."""
        if self._is_closing:
            return
        rows, now = self.fleet.listed(self._filter), self.session.clock()
        columns = columns_for(self.size.width, max((len(row.run.name) for row in rows), default=0))
        keys = [row.run.run for row in rows]
        if (columns, keys) == (self._columns, self._shown):
            self._draw_cells(rows, now)
        else:
            self._draw_table(rows, columns, now)
        empty = self.query_one("#empty", Static)
        empty.display = not rows
        empty.update(_EMPTY if not self._filter else "No run matches this filter; Escape clears it.")
        self.query_one(Head).call_it(self._words(len(rows)))

    def _draw_cells(self, rows: list[FleetRow], now: float) -> None:
        table = self.query_one(DataTable)
        for row in rows:
            for column, width in self._columns:
                cell = self._cell(column, width, row, now)
                if table.get_cell(row.run.run, column.key) != cell:
                    table.update_cell(row.run.run, column.key, cell)

    def _draw_table(self, rows: list[FleetRow], columns: list[tuple[Column, int]], now: float) -> None:
        table, current = self.query_one(DataTable), self.current
        scrolled = table.scroll_y
        table.clear(columns=columns != self._columns)
        if columns != self._columns:
            self._columns = columns
            for column, width in columns:
                head = Text(column.head, justify="right" if column.right else "left")
                table.add_column(head, width=width, key=column.key)
        for row in rows:
            table.add_row(*(self._cell(column, width, row, now) for column, width in columns), key=row.run.run)
        self._shown = [row.run.run for row in rows]
        if current in self._shown:
            table.move_cursor(row=self._shown.index(current), scroll=False)
        table.scroll_to(y=scrolled, animate=False)

    def _cell(self, column: Column, width: int, row: FleetRow, now: float) -> Text:
        cell = column.cell(row, now)
        return Text(cut(cell.plain, width), style=cell.style, justify="right" if column.right else "left", no_wrap=True)

    def _words(self, shown: int) -> str:
        rows = self.fleet.rows.values()
        open_ = sum(row.order()[0] == 0 for row in rows)
        running = sum(not row.has_ended for row in rows)
        filtered = f"  /{self._filter} ({shown})" if self._filter else ""
        return f"perfagent  {some(len(self.fleet.rows), 'run')}, {running:,} going, {open_:,} to look at{filtered}"

    @property
    def current(self) -> str | None:
        """The run below the cursor."""
        row = self.query_one(DataTable).cursor_row
        return self._shown[row] if 0 <= row < len(self._shown) else None

    def firing(self) -> Iterable[Alert]:
        row = self.fleet.rows.get(self.current or "")
        return row.alerts.values() if row else ()

    # ---------------------------------------------------------------------------------------------------------- the keys

    @on(DataTable.RowSelected)
    def _open(self, event: DataTable.RowSelected) -> None:
        if event.row_key.value is not None:
            self.post_message(self.Opened(event.row_key.value))

    def action_move(self, by: int) -> None:
        table = self.query_one(DataTable)
        table.move_cursor(row=table.cursor_row + by)

    def action_filter(self) -> None:
        box = self.query_one(Input)
        box.add_class("open")
        box.focus()

    def action_clear(self) -> None:
        box = self.query_one(Input)
        box.value = ""
        self._close_filter()

    @on(Input.Changed)
    def _filtered(self, event: Input.Changed) -> None:
        self._filter = event.value.strip()
        self.draw()
        self._read_rows()

    @on(Input.Submitted)
    def _close_filter(self) -> None:
        """What was typed stays in force; the line at the top says so."""
        self.query_one(Input).remove_class("open")
        self.query_one(DataTable).focus()
