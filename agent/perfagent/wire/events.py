"""What an event of each kind may hold, and how the server reads a frame whose events may be wrong.

The server refuses a wrong event alone: it stores the samples and the other events of the frame, and names the refused
event in its answer. It ignores unknown fields and the data of an unknown kind, since a newer agent may send both.

The agent does not load this module: it sends what is right, and its tests prove that.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct, field

from perfagent.errors import WireError
from perfagent.wire import media
from perfagent.wire.frame import WIRE_VERSION, Event, Frame, decode
from perfagent.wire.limits import MAX_COUNT, MAX_EVENTS, MAX_STEP, name_problem
from perfagent.wire.query import Severity, State

__all__ = [
    "EVENT_DATA", "MAX_PARTS", "MAX_PART_BYTES", "HistogramMedia", "ImportData", "Rejected", "event_problem", "media_type_of",
    "read_frame",
]  # fmt: skip

MAX_PARTS = 256
"""Pieces of a profile's trace."""
MAX_PART_BYTES = 1024 * 1024

Whole = Annotated[int, Meta(ge=0, le=MAX_STEP)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Part = Annotated[int, Meta(ge=1, le=MAX_PARTS)]
ProfileId = Annotated[str, Meta(pattern=r"^[0-9A-Za-z]{1,64}\Z")]
"""It stands in the header that names the file of the trace."""
Tags = Annotated[list[str | int | float | bool], Meta(max_length=4096)]
Table = dict[str, Any] | str
"""Text where the agent could not read the table: the name of its type."""
Cut = str
"""An entry "N more" stands in the place of what an agent left out of a long list."""


class _Described(Struct):
    """What a process says of itself, at its start or when it knows."""

    name: str | None = None
    config: Table | None = None
    tags: Tags | None = None
    group: str | None = None
    notes: str | None = None
    start_step: Whole | None = None
    world_size: Count | None = None
    host: str | None = None
    command: list[str] | str | None = None
    python: str | None = None
    torch: str | None = None


class StateData(_Described, kw_only=True):
    """How a process is: at its start who it is, at its end why."""

    state: State
    pipeline_stage: Whole | None = None
    stage: Whole | None = None
    pid: Count | None = None
    heartbeat: bool | None = None
    started: float | None = None
    reason: str | None = None
    exception: str | None = None
    traceback: str | None = None
    unused: str | None = None
    oom_kills: Count | None = None


class ContextData(_Described):
    """Configuration, code and environment."""

    git: Table | None = None
    environment: Table | None = None
    packages: Table | None = None


class AlertData(Struct):
    """What the script says with run.alert(). Or what `perfagent run` has to say: unrecorded: how many processes a script
    has started that made no step itself; failed: how many of them failed; ended: how, each way once."""

    title: str | None = None
    text: str | None = None
    level: str | None = None
    unrecorded: Count | None = None
    failed: Count | None = None
    ended: list[str] | None = None


class PhaseData(Struct):
    name: str | None = None
    begin_step: Whole | None = None
    duration_s: float | None = None


class LogData(Struct):
    lines: list[str] | None = None
    stream: str | None = None


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


class Operator(Struct):
    name: str
    calls: Whole
    self_cpu_s: float
    total_cpu_s: float
    self_device_s: float | None = None
    total_device_s: float | None = None


class Gap(Struct):
    s: float
    after: str
    before: str
    at_s: float | None = None


class Gaps(Struct):
    of: str | None = None
    busy_s: float | None = None
    idle_s: float | None = None
    idle_pct: float | None = None
    longest: list[Gap] | None = None


class ProfileData(Struct):
    """A profile's summary, or a piece of its trace: then with `part` and `payload`."""

    profile: ProfileId
    command: str | None = None
    first_step: Whole | None = None
    last_step: Whole | None = None
    duration_s: float | None = None
    operators: list[Operator] | None = None
    gaps: Gaps | None = None
    shares: dict[str, float] | None = None
    says: list[str] | None = None
    sha256: str | None = None
    cut_short: str | None = None
    trace_left_out: str | None = None
    parts: Annotated[int, Meta(ge=0, le=MAX_PARTS)] | None = None
    part: Part | None = None
    payload: Any = None  # not bytes: msgspec would take text for them, as base64

    def __post_init__(self) -> None:
        if self.payload is None:
            return
        if not isinstance(self.payload, bytes) or len(self.payload) > MAX_PART_BYTES:
            raise ValueError(f"Expected at most {MAX_PART_BYTES} `bytes` as `payload`")
        if self.part is None:
            raise ValueError("A `payload` needs `part`, its number from 1")


class Thread(Struct):
    name: str | None = None
    training: bool | None = None
    main: bool | None = None
    daemon: bool | None = None
    state: str | None = None
    waits_in: str | None = None
    frames: list[str] | None = None


class StacksData(Struct):
    command: str | None = None
    step: Whole | None = None
    why: str | None = None
    threads: list[Thread | Cut] | None = None
    look: Count | None = None
    quiet_s: float | None = None
    longest_s: float | None = None
    within: str | None = None
    goes_on: str | None = None
    others: dict[str, str] | None = None


class ProcessGroup(Struct):
    group: str
    seq: Whole
    backend: str | None = None
    desc: str | None = None
    size: Count | None = None
    members: str | None = None
    waits: bool | None = None
    sizes: str | None = None
    is_new: bool | None = None
    recent: list[tuple[Whole, str]] | None = None


class CollectivesData(Struct):
    step: Whole | None = None
    groups: list[ProcessGroup] | None = None
    complete: bool | None = None


class Line(Struct):
    line: str
    count: Whole
    function: str | None = field(default=None, name="in")


class LinesData(Struct):
    lines: list[Line] | None = None
    looks: Whole | None = None


class CompileData(Struct):
    function: str | None = None
    line: str | None = None
    reason: str | None = None
    seconds: float | None = None
    limit_reached: bool | None = None
    limit: Whole | None = None


class CommandData(Struct):
    """How a process answers a command."""

    command: str
    state: Literal["accepted", "done", "refused"]
    kind: str | None = None
    message: str | None = None
    profile: str | None = None
    step: Whole | None = None
    """After which rank 0 stops; saves: whether trainers write a checkpoint then."""
    saves: bool | None = None


class Gpu(Struct):
    index: Count | None = None
    uuid: str | None = None
    name: str | None = None
    memory_total_bytes: float | None = None
    power_limit_w: float | None = None


class GpuData(Struct):
    what: str | None = None
    driver: str | None = None
    gpus: list[Gpu] | None = None
    index: Count | None = None
    uuid: str | None = None
    reason: str | None = None
    code: Whole | None = None
    meaning: str | None = None


class MemoryGroup(Struct):
    name: str | None = None
    numbers: Whole | None = None
    lr: float | None = None
    parameters: float | None = None
    gradients: float | None = None
    optimizer_state: float | None = None
    offloaded: float | None = None


class MemoryData(Struct):
    """Bytes."""

    parameters: float | None = None
    gradients: float | None = None
    optimizer_state: float | None = None
    offloaded: float | None = None
    activations_and_other: float | None = None
    groups: list[MemoryGroup | Cut] | None = None


class ParametersData(Struct):
    what: str | None = None
    share: float | None = None
    names: list[str] | None = None
    count: Whole | None = None
    of: Whole | None = None
    numbers: Whole | None = None
    without_gradient: Whole | None = None
    without_rate: Whole | None = None
    steps: Whole | None = None


class LossData(Struct):
    """What the loss is made of. broadcast: two shapes, of the prediction and of its difference to the target."""

    kind: str | None = None
    classes: Whole | None = None
    mean: bool | None = None
    fed_by: str | None = None
    broadcast: list[list[Whole]] | None = None


class LeftOutData(Struct):
    """Names of metrics that the agent has no room for: the first of them, and how many they are."""

    limit: Whole | None = None
    names: list[str] | None = None
    count: Whole | None = None


class ThreadData(Struct):
    """A thread of the script that an exception ended. training: the one that trains."""

    name: str | None = None
    reason: str | None = None
    training: bool | None = None
    frames: list[str] | None = None


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
    "state": StateData,
    "context": ContextData,
    "alert": AlertData,
    "phase": PhaseData,
    "log": LogData,
    "finding": FindingData,
    "profile": ProfileData,
    "stacks": StacksData,
    "collectives": CollectivesData,
    "gpu": GpuData,
    "memory": MemoryData,
    "parameters": ParametersData,
    "command": CommandData,
    "loss": LossData,
    "sync": LinesData,
    "lines": LinesData,
    "compile": CompileData,
    "left_out": LeftOutData,
    "thread": ThreadData,
    "media": MediaData,
    "import": ImportData,
}
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
