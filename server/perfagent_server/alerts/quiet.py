"""Until when no channel is notified that an alert fires: mutes, snoozes and silences.

- A mute is on one rule in one run, and a snooze on one alert. Both are columns of the alert.
- A silence matches runs by project, tag, run and rule, and lasts from its start to its end. One that repeats every day
  or week is a maintenance window.

A delivery that is held back goes out when the quiet is over, if the alert still fires (outbox.py asks again then). That
an alert is resolved is never held back: whoever was told that it fires would believe it for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select, update
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.expression import func

from perfagent_server.store.stored_json import stored_names, stored_number
from perfagent_server.store.tables import alert, delivery, silence
from perfagent_server.store.tables import run as runs

__all__ = ["DAY_S", "UNTIL_UNDONE", "WEEK_S", "Quiet", "Silence", "held", "release", "unreadable_silences"]

UNTIL_UNDONE = 253402300799.0
"""The last second of the year 9999."""
DAY_S, WEEK_S = 86400.0, 7 * 86400.0
_EVERY_S = {"daily": DAY_S, "weekly": WEEK_S}
_MOST_LOOKS = 100  # at silences that begin where another one ends


@dataclass(frozen=True, slots=True)
class Silence:
    """What it matches: empty means any. run: an id or a name. starts, ends: Unix seconds, of the first time if it
    repeats ("daily" or "weekly", in UTC)."""

    id: str
    project: str
    tag: str
    run: str
    rule: str
    starts: float
    ends: float
    repeats: str

    @classmethod
    def read(cls, row: Mapping[Any, Any]) -> Silence | None:
        """None where it names no times: nobody knows what is to be quiet, and so nothing is."""
        if _time(row["starts"]) is None or _time(row["ends"]) is None:
            return None
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})

    def matches(self, about: _About) -> bool:
        return (
            self.project in ("", about.project)
            and (not self.tag or self.tag in about.tags)
            and self.run in ("", about.run, about.name)
            and self.rule in ("", about.rule)
        )

    def until(self, now: float) -> float | None:
        """When it ends, if it is on."""
        every_s = _EVERY_S.get(self.repeats)
        if now < self.starts:
            return None
        ends = self.ends if every_s is None else self.ends + (now - self.starts) // every_s * every_s
        return ends if now < ends else None


@dataclass(frozen=True, slots=True)
class _About:
    """An alert, as mutes, snoozes and silences see it."""

    alert: str
    run: str
    rule: str
    project: str
    name: str
    tags: Sequence[str]
    snoozed_until: float


class Quiet:
    """What is quiet at one moment: read once, asked for any number of alerts."""

    def __init__(self, connection: Connection, now: float) -> None:
        self.connection, self.now = connection, now
        rows = connection.execute(select(silence)).mappings()
        self.silences = [found for row in rows if (found := Silence.read(row)) is not None]

    def until(self, ids: Iterable[str]) -> dict[str, float]:
        """Until when each of these alerts is quiet. One that is not is left out."""
        about = _read(self.connection, ids)
        muted = self._muted({one.run for one in about})
        found = {one.alert: self._of(one, muted.get((one.run, one.rule), 0.0)) for one in about}
        return {ident: until for ident, until in found.items() if until > self.now}

    def silenced_until(self, ids: Iterable[str]) -> dict[str, float]:
        """The same by silences alone."""
        found = {one.alert: self._silenced(one, self.now) for one in _read(self.connection, ids)}
        return {ident: until for ident, until in found.items() if until > self.now}

    def _of(self, one: _About, muted_until: float) -> float:
        return self._silenced(one, max(self.now, muted_until, one.snoozed_until))

    def _silenced(self, one: _About, at: float) -> float:
        """From `at` on, through silences that follow each other."""
        mine = [each for each in self.silences if each.matches(one)]
        for _ in range(_MOST_LOOKS):
            ends = [until for each in mine if (until := each.until(at)) is not None]
            if not ends:
                break
            at = max(ends)
        return at

    def _muted(self, of_runs: Iterable[str]) -> dict[tuple[str, str], float]:
        newest = select(alert.c.run, alert.c.muted_rule, func.max(alert.c.muted_until).label("until"))
        newest = newest.where(alert.c.run.in_(list(of_runs)), alert.c.muted_until > self.now)
        rows = self.connection.execute(newest.group_by(alert.c.run, alert.c.muted_rule))
        return {(row.run, row.muted_rule): _time(row.until) or 0.0 for row in rows}


def unreadable_silences(connection: Connection) -> list[str]:
    """The ids of those that silence nothing, because nobody can read when."""
    rows = connection.execute(select(silence).order_by(silence.c.id)).mappings()
    return [row["id"] for row in rows if Silence.read(row) is None]


def held(now: float) -> ColumnElement[bool]:
    """Whether a delivery waits for its time: it was never tried, and is not about to be."""
    later = (delivery.c.tries == 0) & (delivery.c.due > now)
    return (delivery.c.event == "alert.firing") & (delivery.c.state == "waiting") & later


def release(connection: Connection, now: float) -> bool:
    """Gives each delivery that is held back its time anew, after something became quiet or loud. Whether one is due now,
    as is what only a quiet held back that is over: it has waited long enough to show that it does not flap."""
    columns = delivery.c.id, delivery.c.alert, delivery.c.ready, delivery.c.due
    is_number = delivery.c.ready <= UNTIL_UNDONE, delivery.c.due <= UNTIL_UNDONE
    rows = connection.execute(select(*columns).where(held(now), *is_number)).all()
    quiet = Quiet(connection, now).until({row.alert for row in rows})
    due = {row.id: max(row.ready if row.due <= row.ready else 0.0, quiet.get(row.alert, 0.0)) for row in rows}
    for identifier, time in due.items():
        connection.execute(update(delivery).where(delivery.c.id == identifier).values(due=time))
    return any(time <= now for time in due.values())


def _read(connection: Connection, ids: Iterable[str]) -> list[_About]:
    query = select(
        alert.c.id, alert.c.run, alert.c.rule, alert.c.snoozed_until, runs.c.project, runs.c.name, runs.c.tags
    )
    query = query.join(runs, runs.c.id == alert.c.run).where(alert.c.id.in_(list(ids)))
    return [_about(row) for row in connection.execute(query)]


def _about(row: Any) -> _About:
    return _About(
        row.id, row.run, row.rule, row.project, row.name, stored_names(row.tags), _time(row.snoozed_until) or 0.0
    )


def _time(value: object) -> float | None:
    """Unix seconds of a row, as far as they are any."""
    found = stored_number(value)
    return None if found is None or abs(found) > UNTIL_UNDONE else found
