"""Turns rows of POST /log into frames of a source that this server keeps for each (run, rank).

They take the same way as an agent's frames, so everything behind it (exactly-once, rules, live, export) is the same. A
request with an idempotency key first writes down which (source, seq) its frames get; the retry finds that and sends the
very same frames, which the ledger then knows. So a retry is safe also when the server was killed between the two.
Nobody knows how often such a program sends: its silence is judged by its own habit (engine/silence.py), and a row may say
how it ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
import time
import uuid
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec
from sqlalchemy import Connection, delete, insert, select

from perfagent.wire import Event, Frame, Group, from_json
from perfagent.wire.limits import MAX_STEP, name_problem
from perfagent_server.database import StorageError, Unsure
from perfagent_server.ingest.batcher import Batcher
from perfagent_server.ingest.sender_limits import Sender
from perfagent_server.refusal import RefusalError
from perfagent_server.store.interface import Receipt
from perfagent_server.store.tables import idempotency
from perfagent_server.store.write.append import deletion_mark
from perfagent_server.store.write.lifecycle import ENDED, JSON_SOURCE

if TYPE_CHECKING:
    from perfagent_server.database import Database
    from perfagent_server.ingest.group_commit import Ingest
    from perfagent_server.ingest.new_runs import NewRuns
    from perfagent_server.runs.run_queries import Runs

__all__ = ["STATES", "LogRow", "LogRows", "parse_rows", "plain_rows"]

STATES = ("starting", *ENDED)
"""What a row may say of its run: a new one of that name begins, or how it ended."""

MAX_ROWS = 10_000
_KEPT_S = 7 * 86400.0  # how long an idempotency key is remembered
_TURNS = 8  # requests that hold a connection of their own, where servers take turns
_MAX_SOURCES = 10_000


class LogRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row as it was sent. step: None is one more than the last; time: Unix seconds, None is now; state: one of
    STATES, None says nothing; reason: why it ended, in the program's words; config, tags, group: of its run."""

    project: str = "default"
    run: str
    step: int | None = None
    metrics: dict[str, float]
    rank: int = 0
    time: float | None = None
    state: str | None = None
    reason: str = ""
    config: dict[str, Any] = {}
    tags: list[str] = []
    group: str = ""

    @property
    def describes(self) -> dict[str, Any]:
        """What it says of its run, besides its state."""
        said = {"config": self.config, "tags": self.tags, "group": self.group}
        return {name: value for name, value in said.items() if value}


_decoder = msgspec.json.Decoder(LogRow | list[LogRow])


def plain_rows(body: bytes) -> list[LogRow] | None:
    """The rows of a request as most programs send them, checked in a third of the time; None for anything else: then
    parse_rows() takes them, or says what is wrong with them."""
    try:
        decoded = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    rows = decoded if isinstance(decoded, list) else [decoded]
    return rows if len(rows) <= MAX_ROWS and all(map(_is_plain, rows)) else None


def _is_plain(row: LogRow) -> bool:
    return (
        _is_plain_text(row.run)
        and (row.project == "default" or _is_plain_text(row.project))
        and (row.step is None or 0 <= row.step <= MAX_STEP)
        and 0 <= row.rank < 2**31
        and row.time is None
        and row.state is None
        and not row.describes
        and not row.reason
    )


def _is_plain_text(text: str) -> bool:
    return text.isascii() and text.isprintable() and 1 <= len(text) <= 256


def parse_rows(value: Any) -> list[LogRow]:
    """Raises RefusalError that names the field."""
    if isinstance(value, dict):
        return [_parse_row(value, "")]
    if not isinstance(value, list):
        raise _bad('the body must be {"run": NAME, "metrics": {...}} or a list of such rows', None)
    if len(value) > MAX_ROWS:
        raise _bad(f"the list has {len(value)} rows; at most {MAX_ROWS} are allowed in one request", None)
    return [_parse_row(item, f"{index}.") for index, item in enumerate(value)]


def _bad(message: str, field: str | None) -> RefusalError:
    return RefusalError("bad_request", message, field)


def _parse_row(item: Any, place: str) -> LogRow:
    if not isinstance(item, dict):
        raise _bad('a row must be an object: {"run": NAME, "metrics": {...}}', place.rstrip(".") or None)
    state = item.get("state")
    if state is not None and state not in STATES:
        raise _bad(f'"state" must be one of {", ".join(STATES)}, not {state!r:.80}', f"{place}state")
    config, tags = item.get("config", {}), item.get("tags", [])
    if not isinstance(config, dict) or not _is_storable(config):
        raise _bad(f'"config" must be an object with numbers of at most 64 bits, not {config!r:.80}', f"{place}config")
    if not isinstance(tags, list) or not all(isinstance(tag, str) and tag for tag in tags):
        raise _bad(f'"tags" must be a list of texts, not {tags!r:.80}', f"{place}tags")
    group = _text(item, "group", place, None) if item.get("group") else ""
    metrics = item.get("metrics", {} if state or config or tags or group else None)
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
        config=config,
        tags=tags,
        group=group,
    )


def _is_storable(config: Mapping[str, Any]) -> bool:
    try:
        msgspec.msgpack.encode(config)
    except (OverflowError, TypeError, RecursionError):
        return False
    return True


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


@dataclass(slots=True)
class _Named:
    """The run that a name stands for. stored: False until its first frame is committed; nobody else can know of it
    before."""

    id: str
    attempt: int
    stored: bool = True


_Request = tuple[Sequence[LogRow], bytes, str | None, Sender]
"""Rows, the body that they came in, the idempotency key, and whose limit new runs count against."""
_Placed = tuple[list[Frame], list[dict[str, Any]], set[str]]
"""Frames, the place of each row, and for a retry which of its runs were deleted since."""
_Newest = Mapping[tuple[str, str], Mapping[str, Any]]
"""By (project, name): id and attempt of the run that was begun last."""


class LogRows:
    """Rows are placed by one thread at a time, which reads and writes the database meanwhile. What the event loop has to
    change in the same tables it leaves to that thread: it never waits for it."""

    def __init__(
        self,
        database: Database,
        runs: Runs,
        ingest: Ingest,
        new_runs: NewRuns,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database, self._runs, self._ingest, self._clock = database, runs, ingest, clock
        self._new_runs = new_runs
        self._lock = threading.Lock()  # of _named and _sources; held over I/O, so the event loop only tries it
        self._changes: deque[Callable[[], object]] = deque()
        self._of_name: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._turns = asyncio.Semaphore(_TURNS)
        self._turning = ThreadPoolExecutor(_TURNS, thread_name_prefix="perfagent-turns")
        self._placing: Batcher[_Request, _Placed] = Batcher(self._place_all)
        self._named: dict[tuple[str, str], _Named] = {}  # by (project, name)
        self._sources: dict[tuple[str, int], _Source] = {}  # by (run id, rank)

    async def accept(
        self,
        rows: Sequence[LogRow],
        *,
        sender: Sender,
        body: bytes = b"",
        key: str | None = None,
        limited: bool = False,
    ) -> tuple[list[Receipt], list[dict[str, Any]]]:
        """The receipts, and {"run", "project", "name", "step"} of each run that was touched; step: the greatest of the
        rows, or where the run is, when nothing was stored. sender: whose limit new runs count against; limited: whether
        the key may send to one project only."""
        if not rows:
            return [], []
        async with self._alone_with({f"{row.project}\0{row.run}" for row in rows}):
            frames, places, deleted = await self._placing.ask((rows, body, key, sender))
            receipts = await self._store(frames, places, deleted, limited=limited, again=key is not None)
        began: dict[str, int] = {}
        reached: dict[str, int] = {}
        for place in places:
            source: str = place["source"]
            step: int = place["step"]
            # a retry may find places that an older server wrote down
            began.setdefault(source, place.get("before", step))
            reached[source] = max(reached.get(source, 0), step)
        touched: dict[str, dict[str, Any]] = {}
        for frame, receipt in zip(frames, receipts, strict=True):
            step = reached[frame.source]
            if receipt.rejected and not receipt.stored and not frame.events:
                self._change(partial(self._take_back, frame, step, began[frame.source]))
                step = began[frame.source]
            row = touched.setdefault(
                frame.run, {"run": frame.run, "project": frame.project, "name": frame.name, "step": step}
            )
            row["step"] = max(row["step"], step)
        return receipts, list(touched.values())

    @asynccontextmanager
    async def _alone_with(self, names: set[str]) -> AsyncIterator[None]:
        """Where other servers use the database, one at a time takes rows of a run of this name: what a row without a step
        counts on from, and which run a name stands for, is read from the tables."""
        if not self._database.is_shared:
            yield
            return
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as held:
            for name in sorted(
                names
            ):  # inside this server first: then one waits for the other servers, and no thread is held
                await held.enter_async_context(self._of_name.setdefault(name, asyncio.Lock()))
            await held.enter_async_context(self._turns)
            turn = self._database.alone_with(names)
            await loop.run_in_executor(self._turning, turn.__enter__)
            try:
                yield
            finally:
                await loop.run_in_executor(self._turning, turn.__exit__, None, None, None)

    async def _store(
        self,
        frames: Sequence[Frame],
        places: Sequence[dict[str, Any]],
        deleted: set[str],
        *,
        limited: bool,
        again: bool,
    ) -> list[Receipt]:
        """again: whether the very same frames come again when they cannot be stored now."""
        there = [frame for frame in frames if frame.run not in deleted]
        try:
            stored = iter(await self._ingest.accept(there, limited=limited))
        except StorageError as error:
            if not again and not isinstance(error, Unsure):
                self._change(partial(self._undo, frames, places))
            raise
        self._change(partial(self._note_stored, there))
        return [Receipt(0, frame.samples) if frame.run in deleted else next(stored) for frame in frames]

    def _change(self, change: Callable[[], object]) -> None:
        """Changes _named or _sources: now, or where rows are being placed at this moment, before the next ones are."""
        self._changes.append(change)
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """The lock is held."""
        while self._changes:
            self._changes.popleft()()

    def _note_stored(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            named = self._named.get((frame.project, frame.name or ""))
            if named is not None and named.id == frame.run:
                named.stored = True

    def _undo(self, frames: Sequence[Frame], places: Sequence[dict[str, Any]]) -> None:
        """Nothing of a request was stored: its steps are free again, unless somebody counted on from them meanwhile,
        and a rank that was never heard before has not been heard."""
        began: dict[str, int] = {}
        reached: dict[str, int] = {}
        for place in places:
            began.setdefault(place["source"], place["before"])
            reached[place["source"]] = place["step"]
        for frame in frames:
            source = self._sources.get((frame.run, frame.rank))
            if source is None or source.id != frame.source:
                continue
            if source.seq == 1:
                del self._sources[frame.run, frame.rank]
            elif source.step == reached[source.id]:
                source.step = began[source.id]

    def _take_back(self, frame: Frame, reached: int, began: int) -> None:
        """Nothing of a frame was stored: its steps are free again, unless somebody counted on from them meanwhile."""
        source = self._sources.get((frame.run, frame.rank))
        if source is not None and source.id == frame.source and source.step == reached:
            source.step = began

    def forget(self, run: str) -> None:
        """After a run was deleted: its name makes a new one."""
        self._change(partial(self._forget, run))

    def _forget(self, run: str) -> None:
        self._named = {name: named for name, named in self._named.items() if named.id != run}
        self._sources = {place: source for place, source in self._sources.items() if place[0] != run}

    def _place_all(self, requests: Sequence[_Request]) -> list[_Placed | Exception]:
        # asked again for each batch: an agent may have begun a new attempt, or a run, of a name
        with self._lock:
            newest = self._runs.newest_named({(row.project, row.run) for rows, *_ in requests for row in rows})
            placed: list[_Placed | Exception] = []
            for rows, body, key, sender in requests:
                self._settle()
                try:
                    placed.append(self._frames(rows, body, key, sender, newest))
                except Exception as error:  # noqa: BLE001 - of this request alone
                    placed.append(error)
            return placed

    def _frames(self, rows: Sequence[LogRow], body: bytes, key: str | None, sender: Sender, newest: _Newest) -> _Placed:
        """Frames, the place of each row, and for a retry which of its runs were deleted since. One request at a time, so
        that a key is used once."""
        scoped = None if key is None else _scoped(key, rows)
        digest = b"" if scoped is None else hashlib.sha256(body).digest()
        kept = None if scoped is None else self._kept(scoped)
        if kept is not None:
            if kept["digest"] != digest:
                raise RefusalError(
                    "key_reused",
                    "this Idempotency-Key was used for another body; use a new key for new rows",
                    "idempotency-key",
                )
            places: list[dict[str, Any]] = kept["places"]
            return _build(rows, places, kept["time"]), places, self._deleted({place["run"] for place in places})
        self._new_runs.begin(sender, self._projects_of_new_runs(rows, newest))
        now = self._clock()
        places = self._places(rows, now, newest)
        frames = _build(rows, places, now)
        if scoped is not None:
            try:
                self._keep(scoped, {"digest": digest, "places": places, "time": now}, now)
            except StorageError:
                self._undo(frames, places)
                raise
        return frames, places, set()

    def _kept(self, key: str) -> dict[str, Any] | None:
        with self._database.read() as connection:
            raw = connection.execute(select(idempotency.c.reply).where(idempotency.c.key == key)).scalar()
        return None if raw is None else msgspec.msgpack.decode(raw)

    def _deleted(self, runs: set[str]) -> set[str]:
        marks = {deletion_mark(run): run for run in runs}
        with self._database.read() as connection:
            found = connection.execute(select(idempotency.c.key).where(idempotency.c.key.in_(marks))).scalars().all()
        return {marks[mark] for mark in found}

    def _keep(self, key: str, kept: dict[str, Any], now: float) -> None:
        raw = msgspec.msgpack.encode(kept)

        def job(connection: Connection) -> None:
            connection.execute(delete(idempotency).where(idempotency.c.created < now - _KEPT_S))
            connection.execute(insert(idempotency).values(key=key, created=now, reply=raw))

        self._database.write(job)

    def _places(self, rows: Sequence[LogRow], now: float, newest: _Newest) -> list[dict[str, Any]]:
        """Where each row goes: run, source, attempt, seq (one frame a source and request), step, and before: the step
        so far."""
        if max(len(self._sources), len(self._named)) >= _MAX_SOURCES:
            self._named.clear()
            self._sources.clear()
        places: list[dict[str, Any]] = []
        used: set[str] = set()
        for row in rows:
            source = self._source(self._run(row, newest.get((row.project, row.run)), now), row.rank)
            if source.id not in used:
                source.seq += 1
                used.add(source.id)
                if self._database.is_shared:  # another server may have stored rows meanwhile
                    stored = self._runs.step_of_rank(source.run, source.attempt, row.rank)
                    source.step = max(source.step, stored)
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

    def _projects_of_new_runs(self, rows: Sequence[LogRow], newest: _Newest) -> list[str]:
        """The project of each run that these rows may begin: at least of those that they will."""
        projects: list[str] = []
        new: set[tuple[str, str]] = set()
        heard: set[tuple[str, str, int]] = set()
        for row in rows:
            name, place = (row.project, row.run), (row.project, row.run, row.rank)
            named = self._run_named(name, newest.get(name))
            if named is None and name not in new:
                new.add(name)
                projects.append(row.project)
            elif row.state == "starting" and (
                place in heard or (named is not None and not self._is_missing(row.rank, named))
            ):
                projects.append(row.project)
            heard.add(place)
        return projects

    def _run_named(self, name: tuple[str, str], newest: Mapping[str, Any] | None) -> _Named | None:
        """The run of a name, by (project, name). newest: the one that was begun last, as far as it is stored."""
        named = self._named.get(name)
        if named is None or named.stored:
            named = None if newest is None else _Named(str(newest["id"]), newest["attempt"])
        return named

    def _run(self, row: LogRow, newest: Mapping[str, Any] | None, now: float) -> _Named:
        """The run that a row belongs to. newest: the one of its name that was begun last, as far as it is stored."""
        name = (row.project, row.run)
        named = self._run_named(name, newest)
        if named is None or (row.state == "starting" and not self._is_missing(row.rank, named)):
            after = 0 if newest is None else newest["attempt"] + 1  # whatever the clock of an agent says
            named = _Named(uuid.uuid4().hex[:12], max(int(now * 1000), after), stored=False)
        self._named[name] = named
        return named

    def _is_missing(self, rank: int, named: _Named) -> bool:
        """Whether a run goes on in which this rank was not heard yet: one more rank of the same start, not a new
        start."""
        if (named.id, rank) in self._sources:
            return False
        return not named.stored or self._runs.awaits_rank(named.id, named.attempt, rank)

    def _source(self, run: _Named, rank: int) -> _Source:
        source = self._sources.get((run.id, rank))
        if source is None or source.attempt != run.attempt:
            step = self._runs.step_of_rank(run.id, run.attempt, rank) if run.stored else 0
            source = self._sources[run.id, rank] = _Source(JSON_SOURCE + uuid.uuid4().hex, run.id, run.attempt, step)
        return source


def _scoped(key: str, rows: Sequence[LogRow]) -> str:
    """An idempotency key as it is kept. Two projects may use the same one, and learn nothing of each other by it."""
    return hashlib.sha256("\0".join([*sorted({row.project for row in rows}), key]).encode()).hexdigest()


def _storable(row: LogRow) -> bool:
    """Whether anything of a row can be stored: by its names, for what else the store refuses (too many of them) only it
    knows."""
    return any(name_problem(name) is None for name in row.metrics)


def _build(rows: Sequence[LogRow], places: Sequence[dict[str, Any]], now: float) -> list[Frame]:
    """One frame for each source; rows of one shape that follow each other share a group. What a row says of its run's
    state becomes an event, as of an agent that sends no sign of life of its own."""
    frames: dict[str, Frame] = {}
    pending: dict[str, list[tuple[LogRow, int]]] = {}
    for row, place in zip(rows, places, strict=True):
        frame = frames.get(place["source"])
        if frame is None:
            frame = frames[place["source"]] = Frame(
                project=row.project, run=place["run"], source=place["source"], attempt=place["attempt"], rank=row.rank,
                seq=place["seq"], name=row.run, sent=now,
            )  # fmt: skip
        time_s = now if row.time is None else row.time
        if row.state is not None:
            told = {"state": row.state, "reason": row.reason, "heartbeat": False}
            frame.events.append(Event(kind="state", time=time_s, step=place["step"], data=told))
        if row.describes:
            frame.events.append(Event(kind="context", time=time_s, step=place["step"], data=row.describes))
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
