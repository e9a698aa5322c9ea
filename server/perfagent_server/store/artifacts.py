"""Stores what agents send apart from samples and lines: answers to commands, profiles with their traces in pieces, and
media (media.py).

The transaction that stores a frame also stores these events, so they are stored exactly once. The pieces of a trace
stay in the database. So they are deleted with their run, and backed up with it, and no piece is ever half committed.
Neither the tail nor the list of events holds them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec
from sqlalchemy import Connection, and_, delete, func, select, update

from perfagent.wire import Event, Frame
from perfagent_server.database import Database
from perfagent_server.rules.causes import profile_words, reason_words
from perfagent_server.rules.texts.reader import reader
from perfagent_server.store.changes import note_change
from perfagent_server.store.media import store_media
from perfagent_server.store.statements import insert_for
from perfagent_server.store.tables import command, command_source, event, profile, profile_part, source
from perfagent_server.store.write.lifecycle import ENDED

__all__ = ["ANSWERS", "Profiles", "Stacks", "StoredProfile", "lasting", "stacks_of", "take"]

ANSWERS = ("accepted", "done", "refused")
MOST_PROFILES = 50
"""Of a run: the oldest go."""
_MESSAGE_CHARACTERS = 2000
_encoder = msgspec.msgpack.Encoder()


def take(connection: Connection, frame: Frame, now: float) -> None:
    """Stores the answers and profiles of one frame, in the caller's transaction. Their fields have the types of
    event_data.py: others were refused before."""
    for item in frame.events:
        if item.kind == "command":
            _answer(connection, frame, item, now)
        elif item.kind == "profile" and _is_piece(item):
            data = item.data
            _insert_new(
                connection,
                profile_part,
                run=frame.run,
                profile=data["profile"],
                part=data["part"],
                data=data["payload"],
            )
        elif item.kind == "profile":
            _profile(connection, frame, item, now)
    if logged := [item for item in frame.events if item.kind == "media" and _is_piece(item)]:
        store_media(connection, frame, logged, now)


def lasting(events: Sequence[Event]) -> Sequence[Event]:
    """The events that are kept as events: all but the pieces of files, and how far an import is."""
    if not any(map(_is_piece, events)):
        return events
    return [item for item in events if not _is_piece(item)]


def _is_piece(item: Event) -> bool:
    return item.kind == "import" or (item.kind in ("profile", "media") and item.data.get("payload") is not None)


def _answer(connection: Connection, frame: Frame, item: Event, now: float) -> None:
    state = item.data["state"]
    here = and_(command_source.c.command == item.data["command"], command_source.c.source == frame.source)
    if state == "accepted":  # however late it comes, it is not news after "done"
        here = and_(here, command_source.c.state == "handed")
    why = item.data.get("why")  # older agents send a sentence
    message = (json.dumps(why, ensure_ascii=False) if why else item.data.get("message") or "")[:_MESSAGE_CHARACTERS]
    connection.execute(update(command_source).where(here).values(state=state, message=message, answered=now))
    if state == "accepted" and frame.rank == 0 and item.data.get("step") is not None:  # of a stop: for the other ranks
        named = {"step": item.data["step"], "saves": item.data.get("saves") is not False, "attempt": frame.attempt}
        its = (command.c.id == item.data["command"]) & (command.c.run == frame.run) & (command.c.kind == "stop")
        connection.execute(update(command).where(its).values(params=json.dumps(named)))
        note_change(connection, "command", frame.run)


def _profile(connection: Connection, frame: Frame, item: Event, now: float) -> None:
    _insert_new(
        connection, profile, run=frame.run, id=item.data["profile"], attempt=frame.attempt, rank=frame.rank,
        step=item.step, time=item.time if math.isfinite(item.time) else now, summary=_encoder.encode(item.data),
        parts=item.data.get("parts") or 0,
    )  # fmt: skip
    newest_first = (
        select(profile.c.id).where(profile.c.run == frame.run).order_by(profile.c.time.desc()).offset(MOST_PROFILES)
    )
    for old in connection.execute(newest_first.limit(MOST_PROFILES)).scalars().all():
        connection.execute(delete(profile).where(profile.c.run == frame.run, profile.c.id == old))
        connection.execute(delete(profile_part).where(profile_part.c.run == frame.run, profile_part.c.profile == old))


def _insert_new(connection: Connection, table: Any, **values: Any) -> None:
    connection.execute(insert_for(connection.dialect.name)(table).values(**values).on_conflict_do_nothing())


@dataclass(slots=True, kw_only=True)
class StoredProfile:
    """One profile. who: asked for it; rule, alert: for which it was taken, empty where a person asked; trace: "complete",
    "arriving", or "none" (note says why); url: of the trace, on this server; operators: with calls, and times in seconds;
    shares: how the time of the steps is divided, in seconds; says: what it shows, in sentences;
    cut_short: why it ended before its time."""

    id: str
    command: str
    who: str
    rule: str
    alert: str
    rank: int
    attempt: int
    first_step: int | None
    last_step: int | None
    time: float
    trace: str
    trace_bytes: int
    url: str
    duration_s: float | None = None
    operators: list[dict[str, Any]] = field(default_factory=list)
    gaps: dict[str, Any] = field(default_factory=dict)
    shares: dict[str, Any] = field(default_factory=dict)
    says: list[str] = field(default_factory=list)
    note: str = ""
    cut_short: str = ""


class Profiles:
    """Reads the profiles of runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, run: str) -> list[StoredProfile]:
        """All of a run, newest first, with the five largest operators of each."""
        with self._database.read() as connection:
            rows = (
                connection.execute(_with_arrived.where(profile.c.run == run).order_by(profile.c.time.desc()))
                .mappings()
                .all()
            )
            known = _Asked(connection, run)
        return [_shown(row, known, operators=5) for row in rows]

    def of_alert(self, run: str, alert: str) -> list[StoredProfile]:
        """Those that were taken for an alert, newest first."""
        return [one for one in self.of(run) if one.alert == alert]

    def get(self, run: str, identity: str) -> StoredProfile | None:
        """One, with all its operators."""
        with self._database.read() as connection:
            row = (
                connection.execute(_with_arrived.where(profile.c.run == run, profile.c.id == identity))
                .mappings()
                .first()
            )
            known = _Asked(connection, run)
        return None if row is None else _shown(row, known, operators=None)

    def trace(self, run: str, identity: str) -> Iterator[bytes]:
        """The gzip file of a complete trace, in pieces."""
        here = and_(profile_part.c.run == run, profile_part.c.profile == identity)
        with self._database.read() as connection:
            numbers = (
                connection.execute(select(profile_part.c.part).where(here).order_by(profile_part.c.part))
                .scalars()
                .all()
            )
        for number in numbers:  # a transaction each: a slow reader holds nothing open
            with self._database.read() as connection:
                data = connection.execute(
                    select(profile_part.c.data).where(here, profile_part.c.part == number)
                ).scalar()
            if data is not None:
                yield bytes(data)


_with_arrived = select(
    profile,
    select(func.count())
    .where(profile_part.c.run == profile.c.run, profile_part.c.profile == profile.c.id)
    .scalar_subquery()
    .label("arrived"),
    select(func.coalesce(func.sum(func.length(profile_part.c.data)), 0))
    .where(profile_part.c.run == profile.c.run, profile_part.c.profile == profile.c.id)
    .scalar_subquery()
    .label("bytes"),
)


class _Asked:
    """What is known of a run's profiles beside what they hold: who asked for each; and why pieces of traces that have not
    come will not come any more: given up by the agent, or the agent is gone."""

    def __init__(self, connection: Connection, run: str) -> None:
        its = select(command.c.id, command.c.who, command.c.rule, command.c.alert).where(command.c.run == run)
        self._commands = {one.id: one for one in connection.execute(its.where(command.c.kind == "profile"))}
        refused = select(command_source.c.command, command_source.c.rank, command_source.c.message).where(
            command_source.c.state == "refused",
            command_source.c.command.in_(select(command.c.id).where(command.c.run == run)),
        )
        self._refused = {(one.command, one.rank): one.message for one in connection.execute(refused)}
        here = select(source.c.attempt, source.c.rank, source.c.state).where(
            source.c.run == run, source.c.state.in_(ENDED)
        )
        self._ended = {(one.attempt, one.rank): one.state for one in connection.execute(here)}

    def by(self, asked: str) -> dict[str, str]:
        """Who asked, and for which alert of which rule."""
        one = self._commands.get(asked)
        return (
            {"who": "", "rule": "", "alert": ""}
            if one is None
            else {"who": one.who, "rule": one.rule, "alert": one.alert}
        )

    def why(self, asked: str, attempt: int, rank: int) -> object:
        """For reason_words; None while they may come."""
        if (asked, rank) in self._refused:
            return self._refused[asked, rank]
        ended = self._ended.get((attempt, rank))
        return None if ended is None else {"key": "process_ended", "state": ended}


def _path(run: str, identity: str) -> str:
    return f"/api/v1/runs/{quote(run, safe='')}/profiles/{identity}"


def _shown(row: Mapping[Any, Any], known: _Asked, *, operators: int | None) -> StoredProfile:
    summary: dict[str, Any] = msgspec.msgpack.decode(row["summary"])

    def whole(name: str) -> int | None:
        value = summary.get(name)
        return value if isinstance(value, int) else None

    listed, idle, took = summary.get("operators"), summary.get("gaps"), summary.get("duration_s")
    divided, says = summary.get("shares"), summary.get("says")
    words = profile_words({**summary, "steps": [whole("first_step"), whole("last_step")]}, reader.get())
    asked, note = str(summary.get("command") or ""), summary.get("no_trace") or summary.get("trace_left_out")
    trace = "none" if not row["parts"] else "complete" if row["arrived"] >= row["parts"] else "arriving"
    if trace == "arriving" and (why := known.why(asked, row["attempt"], row["rank"])):
        trace, note = "none", why
    return StoredProfile(
        id=row["id"], command=asked, **known.by(asked), rank=row["rank"], attempt=row["attempt"],
        first_step=whole("first_step"), last_step=whole("last_step"), time=row["time"], trace=trace,
        trace_bytes=int(row["bytes"]), url="" if trace == "none" else _path(row["run"], row["id"]),
        duration_s=float(took) if isinstance(took, (int, float)) else None,
        operators=listed[:operators] if isinstance(listed, list) else [], gaps=idle if isinstance(idle, dict) else {},
        shares=divided if isinstance(divided, dict) else {},
        says=words or ([str(one) for one in says] if isinstance(says, list) else []),  # agents of before sent sentences
        note=reason_words(note, reader.get()), cut_short=reason_words(summary.get("cut"), reader.get()),
    )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Stacks:
    """What the threads of one rank were doing. command: who asked, "" when nobody did; threads: the training thread
    first."""

    rank: int
    attempt: int
    time: float
    step: int | None
    command: str
    why: str
    threads: list[dict[str, Any]]


def stacks_of(database: Database, run: str, *, command: str | None = None, limit: int = 1000) -> list[Stacks]:
    """The newest stacks of each rank of the newest attempt that sent any; of one command: all that it brought."""
    query = select(event).where(event.c.run == run, event.c.kind == "stacks").order_by(event.c.id.desc()).limit(limit)
    with database.read() as connection:
        rows = connection.execute(query).mappings().all()
    found: dict[int, Stacks] = {}
    for row in rows:
        data = msgspec.msgpack.decode(row["data"])
        asked = str(data.get("command") or "")
        if row["rank"] in found or (command is not None and asked != command):
            continue
        if found and row["attempt"] != next(iter(found.values())).attempt:
            continue
        threads = data.get("threads")
        found[row["rank"]] = Stacks(
            rank=row["rank"], attempt=row["attempt"], time=row["time"], step=row["step"], command=asked,
            why=str(data.get("why") or ""), threads=threads if isinstance(threads, list) else [],
        )  # fmt: skip
    return [found[rank] for rank in sorted(found)]
