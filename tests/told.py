"""A run that is judged by hand, for tests of what its alerts' receivers are told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_folder import place_of
from judging import START, frame, make_evaluator
from sqlalchemy import insert, select, update

from perfagent_server.alerts import acts, channels, tables
from perfagent_server.database import open_database
from perfagent_server.settings import Settings
from perfagent_server.store.tables import alert, delivery, run

NAN = math.nan


class Told:
    """A run that is judged, and its alerts as rows and deliveries; time is moved by hand."""

    def __init__(self, folder: Path) -> None:
        self.database = open_database(Settings(**place_of(folder)))
        self.evaluator, self.now = make_evaluator(), START
        values = {"id": "r", "project": "p", "name": "gpt", "state": "running", "started": START, "updated": START}
        self.database.write(lambda connection: connection.execute(insert(run).values(**values)) and None)
        new = channels.NewChannel(name="hook", url="https://example.org/hook")
        self.database.write(lambda connection: channels.create(connection, new, START))

    def judge(self, steps: Sequence[int], *, after_s: float = 1.0, **series: Sequence[float]) -> None:
        self.now += after_s
        values = {name.replace("__", "/"): values for name, values in series.items()}
        made = frame(values, steps, ident=self.evaluator.upto + 1, received=self.now)
        changes = [("r", change) for change in self.evaluator.take(made)]
        self.database.write(lambda connection: tables.apply(connection, changes, self.now, "http://here/run/{}".format))

    def deliver(self, names: Sequence[str]) -> None:
        """These deliveries have arrived."""
        its = update(delivery).where(delivery.c.id.in_(names))
        values = {"state": "delivered", "tries": 1, "delivered": self.now}
        self.database.write(lambda connection: connection.execute(its.values(**values)) and None)

    def mute(self, ident: str, lasts_s: float | None) -> None:
        until = None if lasts_s is None else self.now + lasts_s
        self.database.write(lambda connection: acts.mute(connection, ident, until, self.now))

    def alerts(self) -> list[tuple[str, str, int]]:
        with self.database.read() as connection:
            found = connection.execute(select(alert).order_by(alert.c.fired, alert.c.id)).mappings()
            return [(row["rule"], row["state"], row["since_step"]) for row in found]

    def id(self) -> str:
        with self.database.read() as connection:
            return str(connection.execute(select(alert.c.id)).scalar_one())

    def deliveries(self) -> list:
        with self.database.read() as connection:
            return list(connection.execute(select(delivery).order_by(delivery.c.created)).mappings())

    def write(self, job: Any) -> None:
        """A statement, or what is called with the connection."""
        self.database.write(job if callable(job) else lambda connection: connection.execute(job) and None)

    def arrive(self, *which: Any) -> None:
        """Whatever is due, or so much of it, has arrived."""
        its = update(delivery).where(delivery.c.state == "waiting", delivery.c.due <= self.now, *which)
        self.write(its.values(state="delivered", tries=1, delivered=self.now))

    def fail(self) -> None:
        """An alert that its receiver knows of."""
        self.judge([1, 2], loss=[2.0, NAN])
        self.arrive()

    def events(self) -> list[str]:
        return [event for event, _ in self.due()]

    def due(self) -> list[tuple[str, float]]:
        """Events, and after how many seconds from now they are sent."""
        return [(row["event"].removeprefix("alert."), max(0.0, row["due"] - self.now)) for row in self.deliveries()]


def heal(told: Told, first: int) -> None:
    told.judge(range(first, first + 60), loss=[2.0] * 60)
