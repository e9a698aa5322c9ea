"""Commands to runs: stored, handed to each process in the answer to one of its frames, and answered by an event.

A process gets a command once. Should the answer to its frame be lost, the frame comes again under the same number and
is given the same command; should the process never answer, it is given it again after REPEAT_S. Commands carry ids, and
an agent obeys each id once, so that both are harmless. Nothing is asked where nobody is left to answer, and nothing
after a command has expired.

A thousand frames a second pass here and almost none of their runs is asked for anything: what is open is in memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from perfagent.errors import WireError
from perfagent.wire import Frame
from perfagent_server.database import Database, StorageError
from perfagent_server.rules.causes import reason_words
from perfagent_server.rules.texts.reader import reader
from perfagent_server.store.artifacts import ANSWERS
from perfagent_server.store.changes import note_change
from perfagent_server.store.stored import Stored
from perfagent_server.store.stored_json import stored_list, stored_object
from perfagent_server.store.tables import command, command_source
from perfagent_server.store.tables import run as runs
from perfagent_server.store.tables import source as sources
from perfagent_server.store.write.lifecycle import ENDED, JSON_SOURCE
from perfagent_server.timestamps import rfc3339, unix_seconds

__all__ = ["KINDS", "AskedRank", "Order", "OrderedSource", "Orders", "Request", "checked"]

log = logging.getLogger(__name__)

EXPIRES_S = 600.0
REPEAT_S = 30.0
RULE_PAUSE_S = 300.0
"""A rule asks the same run for the same thing again after so long."""
MOST_OPEN = 32  # of one run
SILENT_S = 60.0
"""An agent sends something every 5 s; one that was not heard for so long is not waited for."""
_NAMED_RANKS = 8


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kind. kind: bool, int or float; low, high: what is allowed."""

    kind: type
    low: float = 0.0
    high: float = 1.0
    default: Any = None


KINDS: dict[str, dict[str, Parameter]] = {
    "profile": {
        "steps": Parameter(int, 1, 100, 5), "shapes": Parameter(bool), "memory": Parameter(bool), "python": Parameter(bool),
    },
    "stacks": {},
    "flush": {},
    "sampling": {"overhead_budget_pct": Parameter(float, 0.01, 50.0), "sample_s": Parameter(float, 0.5, 3600.0)},
    "stop": {},
}  # fmt: skip
"""What may be asked for. A profile is taken on rank 0 unless ranks are named, everything else on all ranks; a stop
always, and reaches the others once rank 0 has named the step after which all end."""


def checked(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a command, completed. Raises WireError with a sentence for what is not allowed."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise WireError(f"kind is {kind!r:.80}; allowed are {', '.join(KINDS)}")
    allowed = KINDS[kind]
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        takes = f"it takes {', '.join(allowed)}" if allowed else "it takes none but ranks"
        raise WireError(f"{kind} has no parameter {unknown[0][:80]!r}; {takes}")
    found = {name: one.default for name, one in allowed.items() if one.default is not None}
    for name, value in given.items():
        found[name] = _value(name, allowed[name], value)
    if kind == "sampling" and not found:
        raise WireError(f"sampling needs at least one of {', '.join(allowed)}")
    return found


def _value(name: str, parameter: Parameter, value: Any) -> Any:
    if parameter.kind is bool:
        if not isinstance(value, bool):
            raise WireError(f"{name} is {value!r:.80}; true or false is needed")
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # The range first: what is within it is finite.
    if not number or not parameter.low <= value <= parameter.high or (parameter.kind is int and value != int(value)):
        whole = "a whole number" if parameter.kind is int else "a number"
        raise WireError(f"{name} is {value!r:.80}; {whole} from {parameter.low:g} to {parameter.high:g} is needed")
    return parameter.kind(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a run is to be asked for. ranks: None for all; rule, alert: for which it is asked, empty where a person
    asks."""

    run: str
    kind: str
    params: Mapping[str, Any]
    ranks: Sequence[int] | None = None
    who: str
    why: str = ""
    rule: str = ""
    alert: str = ""


@dataclass(slots=True, kw_only=True)
class OrderedSource:
    """What became of a command in one process. state: handed, accepted, done, refused; message: why it was refused, or
    a profile cut short."""

    rank: int
    state: str
    message: str
    handed: str
    answered: str | None


@dataclass(slots=True, kw_only=True)
class AskedRank:
    """A rank that a command is for. state: of its process; heard: when that was last heard; both None if it never was.

    problem: why it cannot answer as things stand: ended, lost, silent, no_agent; empty where it can.
    """

    rank: int
    state: str | None = None
    heard: str | None = None
    problem: str = ""


@dataclass(slots=True, kw_only=True)
class Order:
    """One command. state: waiting (nobody got it yet), handed, accepted, done, refused, expired (no answer in time); of
    several processes that of the one furthest from done. rule, alert: for which it was sent, empty where a person
    asked. asked: whom it is for, until it expires."""

    id: str
    kind: str
    params: dict[str, Any]
    ranks: list[int] | None
    who: str
    why: str
    rule: str
    alert: str
    created: str
    expires: str
    state: str
    sources: list[OrderedSource] = field(default_factory=list)
    asked: list[AskedRank] = field(default_factory=list)


@dataclass(slots=True)
class _Open:
    """is_stop: it waits for the step that rank 0 names; of: the attempt for which rank 0 has done so."""

    ranks: frozenset[int] | None
    expires: float
    is_stop: bool = False
    of: int | None = None
    handed: dict[str, tuple[int, float]] = field(default_factory=dict)  # source -> (seq, when)
    answered: set[str] = field(default_factory=set)

    def take_in(self, known: _Open) -> None:
        """What this server knows of the same command."""
        self.of = self.of if known.of is None else known.of
        self.answered |= known.answered
        for source, handed in known.handed.items():
            self.handed[source] = max(handed, self.handed.get(source, handed), key=itemgetter(1))

    def is_for(self, frame: Frame, now: float) -> bool:
        if (
            now >= self.expires
            or (self.ranks is not None and frame.rank not in self.ranks)
            or frame.source in self.answered
            or (self.is_stop and frame.rank != 0 and frame.attempt != self.of)
        ):
            return False
        handed = self.handed.get(frame.source)
        return handed is None or handed[0] == frame.seq or now - handed[1] > REPEAT_S


class Orders:
    """Commands of all runs. `counters`: for /self. Safe from any thread."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock
        self._began = clock()
        """Before that nobody could be heard."""
        self._lock = threading.Lock()
        self._open: dict[str, dict[str, _Open]] = {}
        self._asked: dict[tuple[str, str, str], float] = {}  # (run, kind, rule) -> when a rule last asked
        self.counters = {"issued": 0, "handed": 0, "answered": 0}
        self._load()

    def _load(self) -> None:
        now = self._clock()
        with self._database.read() as connection:
            rows = connection.execute(select(command).where(command.c.expires > now)).all()
            for row in rows:
                self._open.setdefault(row.run, {})[row.id] = _opened(connection, row)

    def load(self, run: str) -> None:
        """Reads what a run is asked for: another server has asked."""
        its = command.c.run == run, command.c.expires > self._clock()
        with self._database.read() as connection:
            found = {row.id: _opened(connection, row) for row in connection.execute(select(command).where(*its)).all()}
        with self._lock:
            opened = self._open.get(run, {})
            for identity, one in found.items():
                known = opened.get(identity)
                if known is not None:  # what this server has just handed out or heard may not be committed yet
                    one.take_in(known)
            # Those that were not found are being asked for on this server, or have expired.
            if opened or found:
                self._open[run] = opened | found

    # ---- asking

    def issue(
        self, run: str, kind: str, params: Mapping[str, Any], *, ranks: Sequence[int] | None = None, who: str, why: str = "",
        also: Callable[[Connection], object] | None = None,
    ) -> Order:  # fmt: skip
        """Asks a run for something, and waits for the commit. also: written with it. Raises WireError when it cannot be
        asked."""
        request = Request(run=run, kind=kind, params=params, ranks=ranks, who=who, why=why)
        order = self._database.write(self.issuing(request, also))
        self._begin(run, order)
        return order

    def ask(
        self, run: str, kind: str, *, rule: str, why: str, alert: str = "", ranks: Sequence[int] | None = None
    ) -> Future[Order] | None:
        """What a rule asks for: the same thing of the same run once in RULE_PAUSE_S. Does not wait; None when it is too
        soon."""
        now = self._clock()
        with self._lock:
            for old in [known for known, when in self._asked.items() if now - when >= RULE_PAUSE_S]:
                del self._asked[old]
            if (run, kind, rule) in self._asked:
                return None
            self._asked[run, kind, rule] = now
        request = Request(
            run=run,
            kind=kind,
            params=checked(kind, {}),
            ranks=ranks,
            who=f"rule {rule}",
            why=why,
            rule=rule,
            alert=alert,
        )
        try:
            asked = self._database.submit(self.issuing(request))
        except StorageError:
            return None
        asked.add_done_callback(partial(self.note_asked, run))
        return asked

    def note_asked(self, run: str, asked: Future[Order] | Future[Order | None]) -> None:
        """What became of what a rule asks for, for which nobody waits: once it is committed, the run's processes get
        it."""
        error = asked.exception()
        if error is not None:
            log.info("what a rule asked a run for was not asked: %s", error)
        elif (order := asked.result()) is not None:
            self._begin(run, order)

    def _begin(self, run: str, order: Order) -> None:
        ranks = None if order.ranks is None else frozenset(order.ranks)
        expires = unix_seconds(order.expires) or 0.0
        with self._lock:
            self._open.setdefault(run, {})[order.id] = _Open(ranks, expires, order.kind == "stop")
        self.counters["issued"] += 1

    def issuing(
        self, request: Request, also: Callable[[Connection], object] | None = None
    ) -> Callable[[Connection], Order]:
        """The job of the database's writer that asks. Raises WireError when the run cannot be asked. Once it is committed,
        note_asked() begins to hand the command out."""
        identity, run, ranks = "cm_" + secrets.token_hex(10), request.run, request.ranks

        def job(connection: Connection) -> Order:
            now = self._clock()
            row = connection.execute(
                select(runs.c.state, runs.c.world_size, runs.c.attempt).where(runs.c.id == run)
            ).first()
            if row is None:
                raise WireError(f"there is no run {run[:128]!r}")
            if row.state in ENDED:
                raise WireError(f"this run has ended ({row.state}); commands reach only processes that run")
            heard = connection.execute(select(func.max(sources.c.rank)).where(sources.c.run == run)).scalar() or 0
            last = max(row.world_size - 1, heard)
            missing = sorted(rank for rank in ranks or () if rank > last)
            if missing:
                raise WireError(f"rank {missing[0]} is not in this run; its ranks are 0 to {last}")
            asked = _asked(_processes(connection, run, row.attempt, self._began), ranks, now)
            if asked and all(one.problem for one in asked):
                raise WireError(_nobody(asked, now))
            is_open = (command.c.run == run) & (command.c.expires > now)
            if connection.execute(select(func.count()).where(is_open)).scalar_one() >= MOST_OPEN:
                raise WireError(
                    f"{MOST_OPEN} commands of this run are open already; wait until they are answered or expire"
                )
            connection.execute(
                insert(command).values(
                    id=identity, run=run, kind=request.kind, params=json.dumps(dict(request.params)), who=request.who[:128],
                    why=request.why[:2000], rule=request.rule[:64], alert=request.alert, created=now,
                    ranks=None if ranks is None else json.dumps(sorted(set(ranks))), expires=now + EXPIRES_S,
                )
            )  # fmt: skip
            if also is not None:
                also(connection)
            note_change(connection, "command", run)
            order = _order(
                connection.execute(select(command).where(command.c.id == identity)).mappings().one(), [], now
            )
            order.asked = [one.shown for one in asked]
            return order

        return job

    # ---- handing out

    async def for_frame(self, frame: Frame) -> list[dict[str, Any]]:
        """The commands for the sender of a frame that was just stored: [{"id", "kind", "params"}]."""
        wanted = self._wanted(frame)
        if not wanted:
            return []
        try:
            return await asyncio.wrap_future(self._database.submit(partial(self._hand_out, frame=frame, wanted=wanted)))
        except StorageError:
            return []  # the frame is stored, which is what its answer must say; the command goes with a later one

    def _wanted(self, frame: Frame) -> list[str]:
        opened = self._open.get(frame.run)
        if opened is None:
            return []
        now = self._clock()
        with self._lock:
            for identity in [identity for identity, one in opened.items() if now >= one.expires]:
                del opened[identity]
            if not opened:
                self._open.pop(frame.run, None)
            return [identity for identity, one in opened.items() if one.is_for(frame, now)]

    def _hand_out(self, connection: Connection, *, frame: Frame, wanted: Sequence[str]) -> list[dict[str, Any]]:
        about = connection.execute(
            select(sources.c.state, sources.c.attempt).where(sources.c.id == frame.source)
        ).first()
        newest = connection.execute(select(runs.c.attempt).where(runs.c.id == frame.run)).scalar()
        if about is None or about.state in ENDED or about.attempt != newest:
            return []  # a spool of a process that is gone, sent by somebody else
        now = self._clock()
        handed = []
        for row in connection.execute(
            select(command).where(command.c.id.in_(list(wanted))).order_by(command.c.created)
        ).all():
            here = (command_source.c.command == row.id) & (command_source.c.source == frame.source)
            known = connection.execute(select(command_source.c.state).where(here)).first()
            if known is None:
                values = {
                    "command": row.id,
                    "source": frame.source,
                    "rank": frame.rank,
                    "state": "handed",
                    "message": "",
                }
                connection.execute(insert(command_source).values(**values, seq=frame.seq, handed=now))
            elif known.state == "handed":
                connection.execute(update(command_source).where(here).values(seq=frame.seq, handed=now))
            else:
                self._has_answered(frame.run, row.id, frame.source)  # another server took the answer
                continue
            with self._lock:
                one = self._open.get(frame.run, {}).get(row.id)
                if one is not None:
                    one.handed[frame.source] = (frame.seq, now)
            params = _of_stop(row, frame) if row.kind == "stop" else stored_object(row.params)
            handed.append({"id": row.id, "kind": row.kind, "params": params})
        self.counters["handed"] += len(handed)
        return handed

    def _has_answered(self, run: str, identity: str, source: str) -> None:
        with self._lock:
            one = self._open.get(run, {}).get(identity)
            if one is not None:
                one.answered.add(source)

    def note(self, stored: Sequence[Stored]) -> None:
        """After each commit: whoever has answered does not get it again. On the writer thread."""
        for one in stored:
            opened = self._open.get(one.run)
            if opened is None:
                continue
            for event in one.events:
                if event.kind == "command" and event.data.get("command") in opened:
                    with self._lock:
                        asked = opened[event.data["command"]]
                        asked.answered.add(one.source)
                        if one.rank == 0 and event.data.get("step") is not None:
                            asked.of = one.attempt
                    self.counters["answered"] += 1

    def forget(self, run: str) -> None:
        """The run was deleted."""
        with self._lock:
            self._open.pop(run, None)
            for asked in [asked for asked in self._asked if asked[0] == run]:
                del self._asked[asked]

    # ---- reading

    def of(self, run: str, limit: int = 100) -> list[Order]:
        """Commands of a run, newest first."""
        now = self._clock()
        with self._database.read() as connection:
            rows = connection.execute(
                select(command).where(command.c.run == run).order_by(command.c.created.desc()).limit(limit)
            ).mappings().all()  # fmt: skip
            each = connection.execute(
                select(command_source)
                .where(command_source.c.command.in_([row["id"] for row in rows]))
                .order_by(command_source.c.rank)
            ).all()
            newest = connection.execute(select(runs.c.attempt).where(runs.c.id == run)).scalar()
            processes = (
                _processes(connection, run, newest, self._began) if any(now < row["expires"] for row in rows) else []
            )
        orders = [_order(row, [one for one in each if one.command == row["id"]], now) for row in rows]
        for row, order in zip(rows, orders, strict=True):
            if now < row["expires"]:
                order.asked = [one.shown for one in _asked(processes, order.ranks, now)]
        return orders


def _opened(connection: Connection, row: Any) -> _Open:
    """A row of the table of commands, with who has got it."""
    ranks = None if row.ranks is None else frozenset(stored_list(row.ranks))
    opened = _Open(ranks, row.expires, row.kind == "stop", stored_object(row.params).get("attempt"))
    for one in connection.execute(select(command_source).where(command_source.c.command == row.id)):
        opened.handed[one.source] = (one.seq, one.handed)
        if one.state in ANSWERS:
            opened.answered.add(one.source)
    return opened


def _of_stop(row: Any, frame: Frame) -> dict[str, Any]:
    """What a rank is told: who asked, and the step; rank 0 names that itself."""
    named = stored_object(row.params) if frame.rank != 0 else {}
    why = f"{row.who}: {row.why}" if row.why else f"asked by {row.who}"
    return {**{name: named[name] for name in ("step", "saves") if name in named}, "why": why}


_FURTHEST = ("refused", "handed", "accepted", "done")


def _order(row: Mapping[Any, Any], each: Sequence[Any], now: float) -> Order:
    states, language = {one.state for one in each}, reader.get()
    state = next((one for one in _FURTHEST if one in states), "waiting")
    # one that has accepted is given as long again: a profile waits for its first step
    if state in ("waiting", "handed", "accepted") and now >= row["expires"] + (
        EXPIRES_S if state == "accepted" else 0.0
    ):
        state = "expired"
    return Order(
        id=row["id"], kind=row["kind"], params=stored_object(row["params"]), who=row["who"], why=row["why"],
        rule=row["rule"], alert=row["alert"],
        ranks=None if row["ranks"] is None else stored_list(row["ranks"]), created=rfc3339(row["created"]),
        expires=rfc3339(row["expires"]), state=state,
        sources=[
            OrderedSource(
                rank=one.rank, state=one.state, message=reason_words(one.message, language), handed=rfc3339(one.handed),
                answered=rfc3339(one.answered),
            )
            for one in each
        ],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Process:
    """A source of the newest attempt, as far as it may be asked."""

    rank: int
    state: str
    contact: float
    agent: bool
    server_began: float

    def problem(self, now: float) -> str:
        if not self.agent:
            return "no_agent"
        if self.state in ENDED:
            return "ended"
        if self.state == "lost":
            return "lost"
        return "silent" if now - max(self.contact, self.server_began) > SILENT_S else ""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A rank that a command is for, with the process that answers for it, if one was ever heard."""

    rank: int
    process: _Process | None
    problem: str

    @property
    def shown(self) -> AskedRank:
        if self.process is None:
            return AskedRank(rank=self.rank, problem=self.problem)
        return AskedRank(
            rank=self.rank, state=self.process.state, heard=rfc3339(self.process.contact), problem=self.problem
        )


def _processes(connection: Connection, run: str, attempt: int | None, server_began: float) -> list[_Process]:
    rows = connection.execute(
        select(sources.c.id, sources.c.rank, sources.c.state, sources.c.contact).where(
            sources.c.run == run, sources.c.attempt == attempt
        )
    )
    return [
        _Process(row.rank, row.state, row.contact, not row.id.startswith(JSON_SOURCE), server_began) for row in rows
    ]


def _asked(processes: Sequence[_Process], ranks: Sequence[int] | None, now: float) -> list[_Asked]:
    """Whom a command is for; ranks: None for all that were heard. A rank that never was may still come, unless all are
    gone."""
    by_rank: dict[int, list[_Process]] = {}
    for one in processes:
        by_rank.setdefault(one.rank, []).append(one)
    gone = next((one.problem(now) for one in processes), "") if all(one.problem(now) for one in processes) else ""
    asked = []
    for rank in sorted(by_rank if ranks is None else set(ranks)):
        # of several (an agent, and a script that logs as well) the one that can answer
        best = min(
            by_rank.get(rank, ()), key=lambda one: (bool(one.problem(now)), not one.agent, -one.contact), default=None
        )
        asked.append(_Asked(rank, best, gone if best is None else best.problem(now)))
    return asked


_PROBLEMS = {
    "ended": ("has ended", "have ended"),
    "lost": ("is lost", "are lost"),
    "silent": ("is silent", "are silent"),
    "no_agent": ("logs over HTTP, without an agent", "log over HTTP, without an agent"),
}


def _nobody(asked: Sequence[_Asked], now: float) -> str:
    """Why a command is not taken."""
    said = []
    for problem, words in _PROBLEMS.items():
        found = [one for one in asked if one.problem == problem]
        if found:
            contacts = [one.process.contact for one in found if one.process is not None]
            heard = f" (last heard {_ago(now - max(contacts))} ago)" if contacts and problem != "no_agent" else ""
            said.append(f"{_named([one.rank for one in found])} {words[len(found) > 1]}{heard}")
    if all(one.problem == "no_agent" for one in asked):
        do = "perfagent.attach() or `perfagent run` puts an agent into a training"
    else:
        do = "see whether the process lives and reaches this server, then ask again"
    return f"nobody is there to answer: {'; '.join(said)}. Only a process whose agent is in contact can be asked: {do}"


def _named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NAMED_RANKS]))}{more}"


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"
