"""A rules engine on a database of its own, for tests: frames in, rows out, and clocks to turn by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from data_folder import place_of
from sqlalchemy import select

from perfagent.wire import Event, Frame, Group
from perfagent_server.alerts import channels
from perfagent_server.database import Database, open_database
from perfagent_server.engine.scheduler import Engine
from perfagent_server.rules.rule import Life, Question, Rule, Series
from perfagent_server.rules.texts import Text
from perfagent_server.settings import Settings
from perfagent_server.store.sql import SqlStore
from perfagent_server.store.tables import alert, channel

NOW = 1_700_000_000.0


@dataclass(frozen=True, kw_only=True)
class OddRule(Rule):
    """A rule on the loss, for tests of what a rule does wrong: those say what, in judge()."""

    id: ClassVar[str] = "odd"
    severities = ("warning",)
    question = Question.IS_IT_FAST
    reads = (Series("loss", judged=True),)
    life = Life()
    own_text = Text(
        name="Odd", meaning="It does wrong.", fires="Never.", title="Odd", message="{word}.", remedy="Mend it."
    )


class Bench:
    """A database with one enabled channel, and frames of one run after another."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(**place_of(folder))
        self.database: Database = open_database(self.settings)
        self.store = SqlStore(self.database)
        self.seq: dict[str, int] = {}
        with self.database.read() as connection:
            known = connection.execute(select(channel.c.id)).first() is not None
        if not known:
            new = channels.NewChannel(name="hook", url="https://example.org/hook")
            self.database.write(lambda connection: channels.create(connection, new, NOW))

    def send(
        self, values: dict[str, Sequence[float]], steps: Sequence[int], *, name: str = "r", rank: int = 0, now: float = NOW,
        events: Sequence[Event] = (), attempt: int = 1, sent: float | None = None,
    ) -> None:  # fmt: skip
        ident = f"{name}-{attempt}-{rank}"
        self.seq[ident] = self.seq.get(ident, 0) + 1
        times = [now + 0.1 * step for step in steps]
        group = Group(list(steps), times, times, {key: list(column) for key, column in values.items()})
        made = Frame(
            project="p", run=name, source=ident, attempt=attempt, rank=rank, seq=self.seq[ident],
            groups=[group] if steps else [], events=list(events), sent=sent,
        )  # fmt: skip
        self.database.write(lambda connection: self.store.append_in(connection, [made], now))

    def write(self, statement: Any, *rows: Any) -> None:
        self.database.write(lambda connection: connection.execute(statement, *rows) and None)

    def engine(self, **options: object) -> Engine:
        """One clock that is turned by hand is both."""
        if "clock" in options:
            options.setdefault("monotonic", options["clock"])
        return Engine(self.database, self.store, **options)  # type: ignore[arg-type]

    def told(self) -> list[tuple[str, str]]:
        """Run and rule of each alert."""
        return sorted((row["run"], row["rule"]) for row in self.rows(alert))

    def rows(self, table: object) -> list:
        with self.database.read() as connection:
            return list(connection.execute(select(table)).mappings())  # type: ignore[call-overload]
