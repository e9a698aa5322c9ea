"""What an event of each kind may hold, and how the server reads a frame whose events may be wrong.

The server refuses a wrong event alone: it stores the samples and the other events of the frame, and names the refused
event in its answer. It ignores unknown fields and the data of an unknown kind, since a newer agent may send both.
docs/reference/wire.md describes the fields.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import GenericAlias
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from perfagent.errors import WireError
from perfagent.wire import WIRE_VERSION, Event, Frame, Severity, State, decode, media
from perfagent.wire.limits import MAX_COUNT, MAX_EVENTS, MAX_STEP, name_problem

__all__ = [
    "EVENT_DATA", "MAX_PARTS", "MAX_PART_BYTES", "HistogramMedia", "ImportData", "ImportedFinding", "Rejected", "event_problem",
    "media_type_of", "read_frame",
]  # fmt: skip

MAX_PARTS = 256
"""Pieces of a profile's trace."""
MAX_PART_BYTES = 1024 * 1024

Whole = Annotated[int, Meta(ge=0, le=MAX_STEP)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Table = dict[str, Any] | str
"""Text where the agent could not read the table: the name of its type."""
Cut = str
"""An entry "N more" stands in the place of what an agent left out of a long list."""


def _data(required: Mapping[str, Any] | None = None, /, **optional: Any) -> type[Struct]:
    """Fields by their types. Those that may be left out may be nil."""
    fields = [(name, kind | None, None) for name, kind in optional.items()]
    return msgspec.defstruct("Data", [*(required or {}).items(), *fields])


def _list_of(kind: object) -> Any:
    return GenericAlias(list, kind)


_DESCRIBED: dict[str, Any] = {
    "name": str, "config": Table, "tags": Annotated[list[str | int | float | bool], Meta(max_length=4096)], "group": str,
    "notes": str, "start_step": Whole, "world_size": Count, "host": str, "command": list[str] | str, "python": str, "torch": str,
}  # fmt: skip
"""What a process says of itself, at its start or when it knows."""
_LINE = _data({"line": str, "count": Whole}, **{"in": str})
_OPERATOR = _data(
    {"name": str, "calls": Whole, "self_cpu_s": float, "total_cpu_s": float}, self_device_s=float, total_device_s=float
)
_GAP = _data({"s": float, "after": str, "before": str}, at_s=float)
_GAPS = _data(of=str, busy_s=float, idle_s=float, idle_pct=float, longest=_list_of(_GAP))
_THREAD = _data(name=str, training=bool, main=bool, daemon=bool, state=str, waits_in=str, frames=list[str])
_REASON = dict[str, str | int | float | list[str]]
_PROCESS_GROUP = _data(
    {"group": str, "seq": Whole}, backend=str, desc=str, size=Count, members=str, waits=bool, sizes=str, is_new=bool,
    recent=list[tuple[Whole, str]],
)  # fmt: skip
_GPU = _data(index=Count, uuid=str, name=str, memory_total_bytes=float, power_limit_w=float)
_MEMORY = {"parameters": float, "gradients": float, "optimizer_state": float, "offloaded": float}
"""Bytes."""


class FindingData(Struct):
    """What the agent found. explains: rules whose alerts it is a cause of; it raises none of its own then."""

    rule: Annotated[str, Meta(min_length=1)]
    severity: Severity = "warning"
    title: str | None = None
    message: str | None = None
    fix: str | None = None
    since_step: Whole | None = None
    ranks: list[Count] | None = None
    evidence: dict[str, Any] | None = None
    gain_pct: float | None = None
    explains: list[str] | None = None


class ImportedFinding(FindingData, kw_only=True):
    """What was found in an imported run. time, ended: from when to when, Unix seconds; to_the_end: of the run."""

    time: float
    ended: float | None = None
    to_the_end: bool = False
    last_step: Whole | None = None
    cause: str | None = None
    cost: str | None = None


class ImportData(Struct):
    """How far a run is imported. taken: samples and events that were sent, this frame's included, by the sender's keys;
    findings: of the whole run, judged by the sender, in place of those before."""

    import_id: Annotated[str, Meta(min_length=1, max_length=64)] = msgspec.field(name="import")
    taken: dict[str, Whole] = {}
    findings: Annotated[list[ImportedFinding], Meta(max_length=256)] | None = None


class ProfileData(Struct):
    """A profile's summary, or a piece of its trace: then with `part` and `payload`. profile: stands in the header that
    names the file of the trace."""

    profile: Annotated[str, Meta(pattern=r"^[0-9A-Za-z]{1,64}\Z")]
    command: str | None = None
    first_step: Whole | None = None
    last_step: Whole | None = None
    duration_s: float | None = None
    operators: list[_OPERATOR] | None = None  # type: ignore[valid-type]
    gaps: _GAPS | None = None  # type: ignore[valid-type]
    shares: dict[str, float] | None = None
    says: list[str] | None = None
    sha256: str | None = None
    trace_left_out: str | None = None
    cut: _REASON | None = None
    no_trace: _REASON | None = None
    parts: Annotated[int, Meta(ge=0, le=MAX_PARTS)] | None = None
    part: Annotated[int, Meta(ge=1, le=MAX_PARTS)] | None = None
    payload: Any = None  # not bytes: msgspec would take text for them, as base64

    def __post_init__(self) -> None:
        if self.payload is None:
            return
        if not isinstance(self.payload, bytes) or len(self.payload) > MAX_PART_BYTES:
            raise ValueError(f"Expected at most {MAX_PART_BYTES} `bytes` as `payload`")
        if self.part is None:
            raise ValueError("A `payload` needs `part`, its number from 1")


class TableMedia(Struct):
    """The JSON of a logged table. count: of all its rows, of which the first may be here."""

    columns: Annotated[list[str], Meta(max_length=media.MAX_TABLE_COLUMNS)]
    rows: Annotated[list[list[str | int | float | bool | None]], Meta(max_length=media.MAX_TABLE_ROWS)]
    count: Whole

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"Expected {len(self.columns)} cells in each row, one a column")


class HistogramMedia(Struct):
    """The JSON of a logged histogram. counts: of bins of equal width from low to high; count: of all its values, of which
    some may have been looked at; nonfinite: of these, how many are in no bin."""

    low: float
    high: float
    counts: Annotated[list[Whole], Meta(min_length=1, max_length=media.MAX_BINS)]
    nonfinite: Whole
    count: Whole

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError("Expected `low` below `high`")


class MediaData(Struct):
    """An image, a sound, a table or a histogram that the script logged, with its bytes as `payload`; or, without one, how
    many the agent has left out so far."""

    name: str | None = None
    what: media.MediaKind | None = None
    index: Count | None = None
    caption: Annotated[str, Meta(max_length=media.MAX_CAPTION_CHARACTERS)] | None = None
    left_out: Whole | None = None
    payload: Any = None

    def __post_init__(self) -> None:
        if self.payload is None:
            return
        if not isinstance(self.payload, bytes) or len(self.payload) > media.MAX_MEDIA_BYTES:
            raise ValueError(f"Expected at most {media.MAX_MEDIA_BYTES} `bytes` as `payload`")
        if self.what is None or (problem := name_problem(self.name or "")) is not None:
            raise ValueError("A `payload` needs `what`, its kind" if self.what is None else problem)
        if media_type_of(self.what, self.payload) is None:
            raise ValueError("The `payload` is no PNG, JPEG, WebP or GIF, no WAV, MP3 or OGG, as `what` says")


def media_type_of(what: media.MediaKind, payload: bytes) -> str | None:
    """The media type of what was logged; None for what is not of this kind. Raises ValueError for JSON of another form."""
    if what in ("image", "audio"):
        return media.media_type(what, payload)
    try:
        msgspec.json.decode(payload, type=TableMedia if what == "table" else HistogramMedia)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"The `payload` is no JSON of a {what}: {error}") from error
    return media.JSON_TYPE


EVENT_DATA: Mapping[str, type[Struct]] = {
    "state": _data(
        {"state": State}, **_DESCRIBED, pipeline_stage=Whole, stage=Whole, pid=Count, heartbeat=bool, started=float,
        reason=str | _REASON, exception=str, traceback=str, unused=str, oom_kills=Count, local_rank=Count, training_after=Whole,
        continues=str,
    ),
    "context": _data(**_DESCRIBED, git=Table, environment=Table, packages=Table),
    "alert": _data(title=str, text=str, level=str, unrecorded=Count),
    "phase": _data(name=str, begin_step=Whole, duration_s=float),
    "log": _data(lines=list[str], stream=str),
    "finding": FindingData,
    "profile": ProfileData,
    "stacks": _data(
        command=str, step=Whole, why=str, threads=_list_of(_THREAD | Cut), look=Count, quiet_s=float, longest_s=float, within=str,
        goes_on=str, others=dict[str, str],
    ),
    "collectives": _data(step=Whole, groups=_list_of(_PROCESS_GROUP), complete=bool),
    "gpu": _data(
        what=str, driver=str, gpus=_list_of(_GPU), index=Count, uuid=str, reason=str, code=Whole, meaning=str,
    ),
    "memory": _data(
        **_MEMORY, activations_and_other=float, groups=_list_of(_data(**_MEMORY, name=str, numbers=Whole, lr=float) | Cut),
    ),
    "parameters": _data(
        what=str, share=float, names=list[str], count=Whole, of=Whole, numbers=Whole, without_gradient=Whole,
        without_rate=Whole, steps=Whole,
    ),
    "command": _data(
        {"command": str, "state": Literal["accepted", "done", "refused"]}, kind=str, why=_REASON, message=str, profile=str,
        step=Whole, saves=bool,
    ),
    "loss": _data(kind=str, classes=Whole, mean=bool, fed_by=str, broadcast=list[list[Whole]]),
    "sync": _data(lines=_list_of(_LINE), looks=Whole),
    "lines": _data(lines=_list_of(_LINE), looks=Whole),
    "compile": _data(function=str, line=str, reason=str, seconds=float, limit_reached=bool, limit=Whole),
    "left_out": _data(limit=Whole, names=list[str], count=Whole),
    "thread": _data(name=str, reason=str, training=bool, frames=list[str]),
    "media": MediaData,
    "import": ImportData,
}  # fmt: skip
"""The fields of each of EVENT_KINDS. Whatever may be left out may be nil."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """What was left out of a frame: `count` samples of one name, or `count` events of one kind (`event:state`). reason:
    in words for a user, of the first."""

    name: str
    reason: str
    count: int


class _Raw(Frame, kw_only=True):
    """A frame whose events are decoded one by one."""

    events: Annotated[list[msgspec.Raw], Meta(max_length=MAX_EVENTS)] = []  # type: ignore[assignment]  # noqa: RUF012


class _Kind(Struct):
    kind: str


_raw_decoder = msgspec.msgpack.Decoder(_Raw)
_event_decoder = msgspec.msgpack.Decoder(Event)
_kind_decoder = msgspec.msgpack.Decoder(_Kind)
_FIELD = re.compile(r"`\$\.(\w+)")
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def read_frame(data: bytes | bytearray | memoryview) -> tuple[Frame, list[Rejected]]:
    """The frame, as `decode` gives it, without its wrong events; and which those were. Raises WireError."""
    wrong: dict[str, Rejected] = {}
    try:
        frame = decode(data)
    except WireError as problem:
        frame = _without_unreadable_events(data, wrong, problem)
    if frame.events:
        frame.events = [event for event in frame.events if _is_right(event, wrong)]
    return frame, list(wrong.values())


def event_problem(event: Event) -> str | None:
    """Why the server does not take an event; None where it does."""
    if event.step is not None and not 0 <= event.step <= MAX_STEP:
        return f"the step of an event must be from 0 to {MAX_STEP}, not {event.step}"
    fields = EVENT_DATA.get(event.kind)
    if fields is None:
        return None
    try:
        msgspec.convert(event.data, fields)
    except (msgspec.ValidationError, RecursionError) as error:
        return _reason(event.data, fields, str(error))
    return None


def _reason(data: Mapping[str, Any], fields: type[Struct], said: str) -> str:
    """What was given, and what is allowed."""
    found = _FIELD.search(said)
    if found is None:
        return said
    choices = get_type_hints(fields).get(found[1])
    allowed = f"; allowed are {', '.join(get_args(choices))}" if get_origin(choices) is Literal else ""
    return f"{found[1]} is {reprlib.repr(data.get(found[1]))}: {said}{allowed}"


def _is_right(event: Event, wrong: dict[str, Rejected]) -> bool:
    problem = event_problem(event)
    if problem is not None:
        _note(event.kind, problem, wrong)
    return problem is None


def _note(kind: object, problem: str, wrong: dict[str, Rejected]) -> None:
    name = f"event:{kind}" if kind in EVENT_DATA else "event"
    first = wrong.get(name)
    wrong[name] = Rejected(name, first.reason if first else problem, first.count + 1 if first else 1)


def _without_unreadable_events(
    data: bytes | bytearray | memoryview, wrong: dict[str, Rejected], problem: WireError
) -> Frame:
    """The frame without the events that cannot be decoded. Raises `problem` where something else is wrong with it."""
    try:
        raw = _raw_decoder.decode(data)
    except (*_UNREADABLE, WireError):
        raise problem from None
    events = []
    for one in raw.events:
        try:
            events.append(_event_decoder.decode(one))
        except _UNREADABLE as error:
            _note(_kind_of(one), str(error), wrong)
    if not wrong or raw.version != WIRE_VERSION:
        raise problem
    rest = {name: getattr(raw, name) for name in Frame.__struct_fields__ if name != "events"}
    return Frame(events=events, **rest)


def _kind_of(event: msgspec.Raw) -> str:
    try:
        return _kind_decoder.decode(event).kind
    except _UNREADABLE:
        return ""
