"""Which sources have fallen silent, by the monotonic clock.

Silence is measured between two looks at the same stored contact, so that no jump of a wall clock and no downtime of
this server can look like it. A look reads only sources that are in contact, whatever the number of those that were lost
long ago.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import select

from perfagent_server.database import Database, StorageError
from perfagent_server.engine.evaluators import PlanOf
from perfagent_server.rules.life.lost_contact import LostContact
from perfagent_server.store.shards import EVERY, shard_of
from perfagent_server.store.stored import FromTail
from perfagent_server.store.stored_json import stored_names
from perfagent_server.store.tables import run as runs
from perfagent_server.store.tables import source

__all__ = ["GRACE_S", "Silence", "Silent"]

GRACE_S = 60.0
"""Of uptime, before a source is called lost that was not heard since the start: agents need time to find a server that
came back."""
_EVERY_S = 2.0
# A program without an agent sends when it has something, which may be once an epoch: it is called lost (without an
# alert: most such programs just end) after ten times its longest pause, once there were pauses enough to know.
_PAUSES_KNOWN = 10
_PAUSES_TIMES = 10.0
_LEAST_SILENCE_S = 120.0
_UNKNOWN_SILENCE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Silent:
    """A source that was just found silent. heartbeat: it sends by itself, so its silence raises an alert."""

    source: str
    run: str
    attempt: int
    rank: int
    quiet_s: float
    heartbeat: bool


@dataclass(slots=True)
class _Contact:
    """contact: as stored; since: when that value was first met, monotonic; fresh: it moved since this server started;
    upto: the newest frame that was judged."""

    contact: float
    since: float
    fresh: bool
    upto: int = 0


class Silence:
    """look() every two seconds; note() for each frame that is judged. plan_of: the rules of a run, which say how long one
    of its agents may be silent."""

    def __init__(
        self, database: Database, clock: Callable[[], float], monotonic: Callable[[], float], *, plan_of: PlanOf
    ) -> None:
        self._database, self._monotonic, self._plan_of = database, monotonic, plan_of
        self._started = self.due = monotonic()
        self._started_at = clock()
        self._known: dict[str, _Contact] = {}
        self._pauses: dict[str, tuple[int, float]] = {}  # source without an agent -> (how many, the longest, seconds)

    def note(self, stored: FromTail, moment: float, *, by_itself: bool) -> None:
        """A frame was judged. by_itself: its sender has an agent."""
        name, known = stored.source, self._known.get(stored.source)
        if known is not None and stored.id <= known.upto:
            return  # judged again: it was heard when it came
        fresh = stored.received >= self._started_at
        if not by_itself and known is not None:
            count, longest = self._pauses.get(name, (0, 0.0))
            self._pauses[name] = (count + 1, max(longest, moment - known.since))
        was_fresh = known is not None and known.fresh
        self._known[name] = _Contact(stored.received, moment, fresh=fresh or was_fresh, upto=stored.id)

    def look(self, shards: frozenset[str] = EVERY) -> list[Silent]:
        """The sources that have been silent for too long, and are still called alive, of runs in these shards."""
        moment = self._monotonic()
        self.due = moment + _EVERY_S
        with self._database.read() as connection:
            columns = source.c.id, source.c.run, source.c.attempt, source.c.rank, source.c.contact, source.c.heartbeat
            query = select(*columns, runs.c.project, runs.c.rules_off).join(runs, runs.c.id == source.c.run)
            active = source.c.state.in_(("starting", "running"))
            found = connection.execute(query.where(active)).all()
        rows = [row for row in found if shard_of(row.run) in shards]
        silent = []
        for row in rows:
            known = self._known.get(row.id)
            if known is None:
                known = self._known[row.id] = _Contact(row.contact, moment, fresh=False)
            elif known.contact != row.contact:
                known.contact, known.since, known.fresh = row.contact, moment, True
            quiet = moment - known.since
            graced = known.fresh or moment - self._started >= GRACE_S
            if graced and quiet >= self._patience(row.id, row.project, row.rules_off, heartbeat=row.heartbeat):
                silent.append(Silent(row.id, row.run, row.attempt, row.rank, quiet, row.heartbeat))
        self._forget({row.id for row in rows}, moment)
        return silent

    def quiet_s(self, name: str) -> float:
        """For how long a source has been silent by now; infinitely long when nothing is known of it."""
        known = self._known.get(name)
        return math.inf if known is None else self._monotonic() - known.since

    def _patience(self, name: str, project: str, off: str, *, heartbeat: bool) -> float:
        """How long a source may be silent, in seconds. Where the rule is off, no alert says that it was silent for too
        long, but the state of its run does."""
        if heartbeat:
            try:
                rule = self._plan_of(project, stored_names(off), ()).rules.get(LostContact.id)
            except StorageError:
                raise
            except Exception:  # noqa: BLE001 - the rules of one project
                rule = None
            return (rule if isinstance(rule, LostContact) else LostContact()).after_s
        count, longest = self._pauses.get(name, (0, 0.0))
        return max(_LEAST_SILENCE_S if count >= _PAUSES_KNOWN else _UNKNOWN_SILENCE_S, _PAUSES_TIMES * longest)

    def _forget(self, active: set[str], moment: float) -> None:
        gone = [name for name, one in self._known.items() if name not in active and moment - one.since > GRACE_S]
        for name in gone:
            del self._known[name]
            self._pauses.pop(name, None)
