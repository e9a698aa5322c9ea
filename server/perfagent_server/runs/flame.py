"""Builds flame graphs from a profile's trace, one per thread and GPU stream. Calls with the same stack of names are merged."""

from __future__ import annotations

import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from threading import Lock

import msgspec

from perfagent_server.store.artifacts import Profiles

__all__ = ["BusyError", "Flame", "FlameError", "FlameThread", "Flames", "Lane", "lanes"]

MOST_NODES = 2000
"""Of a lane: those with the most time."""
_MOST_LANES = 16
_MOST_PLAIN_BYTES = 128 * 2**20
_KEPT = 8
_PATIENCE_S = 3.0
"""A waiting viewer keeps one of the server's few threads."""
_NAME_CHARACTERS = 200
_ROUNDING_US = 0.002
_STEP = "ProfilerStep#"
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_BACKWARD = "autograd::engine::evaluate_function"


class FlameError(Exception):
    """Why a trace has no flame graph."""


class BusyError(FlameError):
    """Others are worked out first."""


class _Event(msgspec.Struct):
    ph: str = ""
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0


class _Trace(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameThread:
    """kind: "training" (the thread of the steps), "backward", "gpu" (a stream) or "other"; name: its number in the trace."""

    kind: str
    name: str
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flame:
    """Of one thread. All lists have equal length: names, parents (their places, -1 for none), seconds with all that ran inside,
    and calls; left_out: how many others, which took less."""

    names: list[str]
    parents: list[int]
    seconds: list[float]
    calls: list[int]
    left_out: int


@dataclass(frozen=True, slots=True)
class Lane:
    thread: FlameThread
    flame: Flame


class Flames:
    """Of profiles, one worked out at a time: the newest ones are kept."""

    def __init__(self, profiles: Profiles) -> None:
        self._profiles = profiles
        self._working = Lock()
        self._kept: OrderedDict[tuple[str, str], list[Lane]] = OrderedDict()

    def of(self, run: str, profile: str) -> list[Lane]:
        """The thread of the steps first. Raises FlameError."""
        if (kept := self._kept.get((run, profile))) is not None:
            return kept
        if not self._working.acquire(timeout=_PATIENCE_S):
            raise BusyError("traces of others are being read; try again in some seconds")
        try:
            found = self._kept.get((run, profile)) or lanes(_plain(self._profiles.trace(run, profile)))
            self._kept[run, profile] = found
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return found
        finally:
            self._working.release()


def _plain(pieces: Iterable[bytes]) -> bytes:
    opened, plain = zlib.decompressobj(wbits=31), bytearray()
    try:
        for piece in pieces:
            plain += opened.decompress(piece, _MOST_PLAIN_BYTES + 1 - len(plain))
            if len(plain) > _MOST_PLAIN_BYTES:
                most = _MOST_PLAIN_BYTES >> 20
                raise FlameError(f"the trace has more than {most} MiB: too much for a flame graph; Perfetto opens it")
    except zlib.error as error:
        raise FlameError(f"the trace cannot be unpacked: {error}") from error
    return bytes(plain)


def lanes(trace: bytes) -> list[Lane]:
    """trace: Chrome's JSON, as torch.profiler writes it. Raises FlameError."""
    try:
        events = msgspec.json.decode(trace, type=_Trace).events
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FlameError(f"the trace cannot be read: {error}") from error
    by_thread: defaultdict[tuple[int | str, int | str], list[_Event]] = defaultdict(list)
    for event in events:
        if event.ph == "X" and event.cat != "Trace":
            by_thread[event.pid, event.tid].append(event)
    found = [Lane(_thread(str(key[1]), its), _flame(its)) for key, its in by_thread.items()]
    if not found:
        raise FlameError("the trace has no events with a duration")
    order = {"training": 0, "backward": 1, "gpu": 2, "other": 3}
    return sorted(found, key=lambda lane: (order[lane.thread.kind], -lane.thread.busy_s))[:_MOST_LANES]


def _thread(name: str, events: list[_Event]) -> FlameThread:
    events.sort(key=lambda one: (one.ts, -one.dur))
    if any(one.cat in _ON_GPU for one in events):
        kind = "gpu"
    elif any(one.name.startswith(_STEP) for one in events):
        kind = "training"
    else:
        kind = "backward" if any(one.name.startswith(_BACKWARD) for one in events) else "other"
    return FlameThread(kind=kind, name=name, busy_s=sum(dur for depth, _, dur in _nested(events) if not depth) / 1e6)


def _nested(events: Iterable[_Event]) -> Iterator[tuple[int, str, float]]:
    """(depth, name, microseconds) of events by their begin; what goes on beyond what it began in is cut off there. All steps
    have one name."""
    ends: list[float] = []
    for one in events:
        while ends and ends[-1] <= one.ts + _ROUNDING_US:
            ends.pop()
        end = min(one.ts + one.dur, ends[-1]) if ends else one.ts + one.dur
        name = _STEP[:-1] if one.name.startswith(_STEP) else one.name[:_NAME_CHARACTERS]
        yield len(ends), name, end - one.ts
        ends.append(end)


def _flame(events: list[_Event]) -> Flame:
    """events: by their begin."""
    places: dict[tuple[int, str], int] = {}
    parents, names, micros, calls = list[int](), list[str](), list[float](), list[int]()
    path: list[int] = []
    for depth, name, dur in _nested(events):
        del path[depth:]
        parent = path[-1] if path else -1
        place = places.setdefault((parent, name), len(places))
        if place == len(names):
            parents.append(parent)
            names.append(name)
            micros.append(0.0)
            calls.append(0)
        micros[place] += dur
        calls[place] += 1
        path.append(place)
    # Nothing takes longer than what it runs in, and that came first: of what is kept the parents are kept.
    for place, parent in enumerate(parents):
        if parent >= 0:  # times are rounded
            micros[place] = min(micros[place], micros[parent])
    kept = sorted(sorted(range(len(names)), key=lambda one: -micros[one])[:MOST_NODES])
    moved = {-1: -1} | {old: new for new, old in enumerate(kept)}
    return Flame(
        names=[names[one] for one in kept], parents=[moved[parents[one]] for one in kept],
        seconds=[micros[one] / 1e6 for one in kept], calls=[calls[one] for one in kept], left_out=len(names) - len(kept),
    )  # fmt: skip
