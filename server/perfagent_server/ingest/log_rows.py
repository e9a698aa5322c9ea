"""Rows of POST /log, turned into frames of a source that this server keeps for each (run, rank).

They take the same way as an agent's frames, so everything behind it (exactly-once, rules, live, export) is the same. A request
with an idempotency key first writes down which (source, seq) its frames get; the retry finds that and sends the very same
frames, which the ledger then knows. So a retry is safe also when the server was killed between the two. Nobody knows how often
such a program sends: its silence is judged by its own habit (rules/engine.py), and a row may tell how it ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
import time
import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Connection, delete, insert, select

from perfagent.wire import Event, Frame, Group, from_json
from perfagent_server.ingest.limits import MAX_STEP, name_problem
from perfagent_server.lifecycle import ENDED, JSON_SOURCE
from perfagent_server.problems import ApiError
from perfagent_server.store.tables import idempotency

if TYPE_CHECKING:
    from perfagent_server.database import Database
    from perfagent_server.ingest.writer import Ingest
    from perfagent_server.runs import Runs
    from perfagent_server.store.interface import Receipt

__all__ = ["STATES", "LogRow", "LogRows", "parse_rows"]

STATES = ("starting", *ENDED)
"""What a row may say of its run: a new one of that name begins, or how it ended."""

MAX_ROWS = 10_000
_KEPT_S = 7 * 86400.0  # how long an idempotency key is remembered
_MAX_SOURCES = 10_000


@dataclass(frozen=True, slots=True)
class LogRow:
    """One row as it was sent. step: None is one more than the last; time: Unix seconds, None is now; state: one of STATES, None
    says nothing; reason: why it ended, in the program's words."""

    project: str
    run: str
    step: int | None
    metrics: dict[str, float]
    rank: int
    time: float | None
    state: str | None = None
    reason: str = ""


def parse_rows(value: Any) -> list[LogRow]:
    """Raises ApiError that names the field."""
    if isinstance(value, dict):
        return [_parse_row(value, "")]
    if not isinstance(value, list):
        raise _bad('the body must be {"run": NAME, "metrics": {...}} or a list of such rows', None)
    if len(value) > MAX_ROWS:
        raise _bad(f"the list has {len(value)} rows; at most {MAX_ROWS} are allowed in one request", None)
    return [_parse_row(item, f"{index}.") for index, item in enumerate(value)]


def _bad(message: str, field: str | None) -> ApiError:
    return ApiError(400, "bad_request", message, field)


def _parse_row(item: Any, place: str) -> LogRow:
    if not isinstance(item, dict):
        raise _bad('a row must be an object: {"run": NAME, "metrics": {...}}', place.rstrip(".") or None)
    state = item.get("state")
    if state is not None and state not in STATES:
        raise _bad(f'"state" must be one of {", ".join(STATES)}, not {state!r:.80}', f"{place}state")
    metrics = item.get("metrics", None if state is None else {})
    if not isinstance(metrics, dict):
        raise _bad('"metrics" must be an object of names and numbers', f"{place}metrics")
    values: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            values[name] = from_json(value)
        except ValueError as error:
            raise _bad(f"metric {name[:80]!r}: {error}", f"{place}metrics.{name[:80]}") from None
    moment = item.get("time")
    if moment is not None:
        if isinstance(moment, bool) or not isinstance(moment, (int, float)) or not abs(moment) < 1e11:
            raise _bad(f'"time" must be Unix seconds, not {moment!r:.80}', f"{place}time")
        moment = float(moment)
    return LogRow(
        project=_text(item, "project", place, "default"),
        run=_text(item, "run", place, None),
        step=_integer(item, "step", place, 0, MAX_STEP),
        metrics=values,
        rank=_integer(item, "rank", place, 0, 2**31 - 1) or 0,
        time=moment,
        state=state,
        reason=str(item.get("reason") or "")[:4000],
    )


def _text(item: Mapping[str, Any], key: str, place: str, default: str | None) -> str:
    text = item.get(key)
    if text is None:
        text = default
    if not isinstance(text, str) or not 1 <= len(text.encode("utf-8", "replace")) <= 256 or not text.isprintable():
        raise _bad(f'"{key}" must be a printable text of 1 to 256 bytes, not {text!r:.80}', f"{place}{key}")
    return text


def _integer(item: Mapping[str, Any], key: str, place: str, low: int, high: int) -> int | None:
    number = item.get(key)
    if isinstance(number, float) and number.is_integer() and math.isfinite(number):
        number = int(number)
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        raise _bad(f'"{key}" must be a whole number from {low} to {high}, not {number!r:.80}', f"{place}{key}")
    return number


@dataclass(slots=True)
class _Source:
    """What the server keeps for one (run, rank) that is fed by JSON."""

    id: str
    run: str
    attempt: int
    step: int
    seq: int = 0


class LogRows:
    def __init__(self, database: Database, runs: Runs, ingest: Ingest, *, clock: Callable[[], float] = time.time) -> None:
        self._database, self._runs, self._ingest, self._clock = database, runs, ingest, clock
        self._lock = threading.Lock()
        self._ids: dict[tuple[str, str], str] = {}  # (project, name) -> run id
        self._sources: dict[tuple[str, int], _Source] = {}

    async def accept(
        self, rows: Sequence[LogRow], *, body: bytes = b"", key: str | None = None
    ) -> tuple[list[Receipt], list[dict[str, Any]]]:
        """The receipts, and {"run", "project", "name", "step"} of each run that was touched; step: the greatest of the rows, or
        where the run is, when nothing was stored."""
        if not rows:
            return [], []
        frames, places = await asyncio.to_thread(self._frames, rows, body, key)
        receipts = await self._ingest.accept(frames)
        began: dict[str, int] = {}
        reached: dict[str, int] = {}
        for place in places:
            source, step = place["source"], place["step"]
            began.setdefault(source, place.get("before", step))  # a retry may find places that an older server wrote down
            reached[source] = max(reached.get(source, 0), step)
        touched: dict[str, dict[str, Any]] = {}
        for frame, receipt in zip(frames, receipts, strict=True):
            step = reached[frame.source]
            if receipt.rejected and not receipt.stored and not frame.events:
                self._take_back(frame, step, began[frame.source])
                step = began[frame.source]
            row = touched.setdefault(frame.run, {"run": frame.run, "project": frame.project, "name": frame.name, "step": step})
            row["step"] = max(row["step"], step)
        return receipts, list(touched.values())

    def _take_back(self, frame: Frame, reached: int, began: int) -> None:
        """Nothing of a frame was stored: its steps are free again, unless somebody counted on from them meanwhile."""
        with self._lock:
            source = self._sources.get((frame.run, frame.rank))
            if source is not None and source.id == frame.source and source.step == reached:
                source.step = began

    def forget(self, run: str) -> None:
        """After a run was deleted: its name makes a new one."""
        with self._lock:
            self._ids = {name: identifier for name, identifier in self._ids.items() if identifier != run}
            self._sources = {place: source for place, source in self._sources.items() if place[0] != run}

    def _frames(self, rows: Sequence[LogRow], body: bytes, key: str | None) -> tuple[list[Frame], list[dict[str, Any]]]:
        """Frames, and the place of each row. The lock is held while they are written down, so that a key is used once."""
        with self._lock:
            digest = hashlib.sha256(body).digest()
            if key is not None:
                kept = self._kept(key)
                if kept is not None:
                    if kept["digest"] != digest:
                        raise ApiError(
                            422,
                            "key_reused",
                            "this Idempotency-Key was used for another body; use a new key for new rows",
                            "idempotency-key",
                        )
                    return _build(rows, kept["places"], kept["time"]), kept["places"]
            now = self._clock()
            places = self._places(rows, now)
            if key is not None:
                self._keep(key, {"digest": digest, "places": places, "time": now}, now)
            return _build(rows, places, now), places

    def _kept(self, key: str) -> dict[str, Any] | None:
        with self._database.read() as connection:
            raw = connection.execute(select(idempotency.c.reply).where(idempotency.c.key == key)).scalar()
        return None if raw is None else msgspec.msgpack.decode(raw)

    def _keep(self, key: str, kept: dict[str, Any], now: float) -> None:
        raw = msgspec.msgpack.encode(kept)

        def job(connection: Connection) -> None:
            connection.execute(delete(idempotency).where(idempotency.c.created < now - _KEPT_S))
            connection.execute(insert(idempotency).values(key=key, created=now, reply=raw))

        self._database.write(job)

    def _places(self, rows: Sequence[LogRow], now: float) -> list[dict[str, Any]]:
        """Where each row goes: run, source, attempt, seq (one frame a source and request), step, and before: the step so far."""
        places: list[dict[str, Any]] = []
        used: set[str] = set()
        for row in rows:
            source = self._source(row, now)
            if source.id not in used:
                source.seq += 1
                used.add(source.id)
            before = source.step
            if _storable(row):
                source.step = row.step if row.step is not None else min(before + 1, MAX_STEP)
            elif row.state is not None and row.step is not None:
                source.step = row.step
            places.append(
                {
                    "run": source.run, "source": source.id, "attempt": source.attempt, "seq": source.seq, "step": source.step,
                    "before": before,
                }
            )  # fmt: skip
        return places

    def _source(self, row: LogRow, now: float) -> _Source:
        name = (row.project, row.run)
        identifier = None if row.state == "starting" else self._ids.get(name)
        if identifier is not None:
            source = self._sources.get((identifier, row.rank))
            if source is not None:
                return source
        if len(self._sources) >= _MAX_SOURCES:
            self._ids.clear()
            self._sources.clear()
        found = None if row.state == "starting" else self._runs.newest_named(*name)
        if found is None and identifier is None:
            identifier = uuid.uuid4().hex[:12]
            source = _Source(JSON_SOURCE + uuid.uuid4().hex, identifier, int(now * 1000), 0)
        elif found is None:  # made in this very request, by a row of another rank
            assert identifier is not None
            other = next(source for place, source in self._sources.items() if place[0] == identifier)
            source = _Source(JSON_SOURCE + uuid.uuid4().hex, identifier, other.attempt, 0)
        else:
            identifier = str(found["id"])
            step = self._runs.step_of_rank(identifier, found["attempt"], row.rank)
            source = _Source(JSON_SOURCE + uuid.uuid4().hex, identifier, found["attempt"], step)
        self._ids[name] = identifier
        self._sources[identifier, row.rank] = source
        return source


def _storable(row: LogRow) -> bool:
    """Whether anything of a row can be stored: by its names, for what else the store refuses (too many of them) only it knows."""
    return any(name_problem(name) is None for name in row.metrics)


def _build(rows: Sequence[LogRow], places: Sequence[dict[str, Any]], now: float) -> list[Frame]:
    """One frame for each source; rows of one shape that follow each other share a group. What a row says of its run's state
    becomes an event, as of an agent that sends no sign of life of its own."""
    frames: dict[str, Frame] = {}
    pending: dict[str, list[tuple[LogRow, int]]] = {}
    for row, place in zip(rows, places, strict=True):
        frame = frames.get(place["source"])
        if frame is None:
            frame = frames[place["source"]] = Frame(
                project=row.project, run=place["run"], source=place["source"], attempt=place["attempt"], rank=row.rank,
                seq=place["seq"], name=row.run, sent=now,
            )  # fmt: skip
        if row.state is not None:
            told = {"state": row.state, "reason": row.reason, "heartbeat": False}
            frame.events.append(Event(kind="state", time=now if row.time is None else row.time, step=place["step"], data=told))
        if not row.metrics:
            continue
        waiting = pending.setdefault(place["source"], [])
        if waiting and waiting[0][0].metrics.keys() != row.metrics.keys():
            frame.groups.append(_group(waiting, now))
            waiting.clear()
        waiting.append((row, place["step"]))
    for source, waiting in pending.items():
        frames[source].groups.append(_group(waiting, now))
    return list(frames.values())


def _group(rows: Sequence[tuple[LogRow, int]], now: float) -> Group:
    times = array("d", [now if row.time is None else row.time for row, _ in rows]).tobytes()
    return Group(
        step=array("q", [step for _, step in rows]).tobytes(),
        time=times,
        monotonic=times,
        values={name: array("d", [row.metrics[name] for row, _ in rows]).tobytes() for name in rows[0][0].metrics},
    )
