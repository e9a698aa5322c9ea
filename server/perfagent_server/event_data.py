"""What an event of each kind may hold, and how the server reads a frame whose events may be wrong.

The server refuses a wrong event alone: it stores the samples and the other events of the frame, and names the refused
event in its answer. It ignores unknown fields and the data of an unknown kind, since a newer agent may send both.
scripts/references writes the docstrings and meanings into docs/reference/wire.md.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import GenericAlias
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

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
Payload = Annotated[Any, Meta(title="bytes")]  # not `bytes`: msgspec would take text for them, as base64
_ANNOTATED: Any = Annotated  # with what is only known at run time


def _data(says: str, required: Mapping[str, Any] | None = None, /, **optional: Any) -> type[Struct]:
    """says: what such an event means. Fields by their type, or by type and meaning; those that may be left out may be nil."""
    fields: list[Any] = [(name, _explained(kind)) for name, kind in (required or {}).items()]
    fields += [(name, _explained(kind, None), None) for name, kind in optional.items()]
    return msgspec.defstruct("Data", fields, namespace={"__doc__": says})


def _explained(kind: Any, *others: None) -> Any:
    kind, meaning = kind if isinstance(kind, tuple) else (kind, "")
    return _ANNOTATED[Union[(kind, *others)], Meta(description=meaning)]


def _list_of(kind: object) -> Any:
    return GenericAlias(list, kind)


_DESCRIBED: dict[str, Any] = {
    "name": (str, "the name of the run"), "config": (Table, "the configuration of the run"),
    "tags": Annotated[list[str | int | float | bool], Meta(max_length=4096)], "group": (str, "of runs, such as a sweep"),
    "notes": str, "start_step": (Whole, "the first step of this attempt"), "world_size": (Count, "how many ranks there are"),
    "host": (str, "the name of the machine"), "command": (list[str] | str, "the command line"), "python": (str, "its version"),
    "torch": (str, "its version"),
}  # fmt: skip
"""What a process says of itself, at its start or when it knows."""
_LINE = _data("", {"line": (str, "such as `train.py:42`"), "count": Whole}, **{"in": (str, "the function")})
_OPERATOR = _data(
    "", {"name": str, "calls": Whole, "self_cpu_s": (float, "without the operators that it calls"), "total_cpu_s": float},
    self_device_s=float, total_device_s=float,
)  # fmt: skip
_GAP = _data("", {"s": float, "after": (str, "the operator before it"), "before": str}, at_s=(float, "when it began"))
_GAPS = _data(
    "", of=(str, "`device`, or `operators` of the training thread"), busy_s=float, idle_s=float,
    idle_pct=float, longest=_list_of(_GAP),
)  # fmt: skip
_THREAD = _data(
    "", name=str, training=(bool, "it is the thread that trains"), main=bool, daemon=bool, state=str,
    waits_in=str, frames=(list[str], "`file:line in function: source`, the innermost last"),
)  # fmt: skip
_REASON = Annotated[dict[str, str | int | float | list[str]], Meta(title="reason")]
_PROCESS_GROUP = _data(
    "", {"group": str, "seq": (Whole, "how many collectives this rank has called in it")}, backend=str, desc=str,
    size=(Count, "its ranks"), members=(str, "a hash of them"), waits=(bool, "the last one has not completed"),
    sizes=(str, "of the newest one's input"), is_new=(bool, "this rank has never called it after the one before it"),
    recent=(list[tuple[Whole, str]], "number and name of the last ones, oldest first"),
)  # fmt: skip
_GPU = _data("", index=Count, uuid=str, name=str, memory_total_bytes=float, power_limit_w=float)
_MEMORY = {"parameters": float, "gradients": float, "optimizer_state": float, "offloaded": float}
"""Bytes."""


class FindingData(Struct):
    """A [finding](#findings) of the agent."""

    rule: Annotated[str, Meta(min_length=1)]
    severity: Severity = "warning"
    title: str | None = None
    message: str | None = None
    fix: str | None = None
    since_step: Whole | None = None
    ranks: list[Count] | None = None
    evidence: dict[str, Any] | None = None
    gain_pct: float | None = None
    """how much shorter a step would be without it"""
    explains: list[str] | None = None
    """rules: it raises no alert of its own, and goes to `causes` in the evidence of theirs; the server writes its `message` and
    `fix` from `evidence`, where it can (`agent/perfagent/wire/evidence.py`)"""


class ImportedFinding(FindingData, kw_only=True):
    time: float
    """when it began, Unix seconds"""
    ended: float | None = None
    to_the_end: bool = False
    """of the run"""
    last_step: Whole | None = None
    cause: str | None = None
    cost: str | None = None


class ImportData(Struct):
    """How far a run is imported. The server does not judge the frames of a source whose id begins with `import-`."""

    import_id: Annotated[str, Meta(min_length=1, max_length=64)] = msgspec.field(name="import")
    """the id of the import"""
    taken: dict[str, Whole] = {}
    """samples and events sent so far, this frame's included, by keys of the sender; `POST /imports/known` answers them"""
    findings: Annotated[list[ImportedFinding], Meta(max_length=256)] | None = None
    """of the whole run, in place of those before: they become resolved alerts; no channel is notified"""


class ProfileData(Struct):
    """First the summary of a profile, then its trace in pieces: `profile`, `part`, `parts` and `payload`."""

    profile: Annotated[
        str, Meta(pattern=r"^[0-9A-Za-z]{1,64}\Z")
    ]  # stands in the header that names the file of the trace
    """its id: 1 to 64 ASCII letters and digits"""
    command: str | None = None
    """the id of the command that asked for it"""
    first_step: Whole | None = None
    last_step: Whole | None = None
    duration_s: float | None = None
    operators: list[_OPERATOR] | None = None  # type: ignore[valid-type]
    """the 100 with the most time of their own, and the 20 with the most in total"""
    gaps: _GAPS | None = None  # type: ignore[valid-type]
    """when nothing ran on the device or, without one, between the operators"""
    shares: dict[str, float] | None = None
    """[where the time went](#shares-of-a-profile), in seconds"""
    says: list[str] | None = None
    """what it shows, in sentences; else the server writes them"""
    sha256: str | None = None
    """of the whole trace"""
    trace_left_out: str | None = None
    """why there is no trace, from older agents"""
    cut: _REASON | None = None
    """the [reason](#reasons) why it ended early"""
    no_trace: _REASON | None = None
    """the [reason](#reasons) why there is no trace"""
    parts: Annotated[int, Meta(ge=0, le=MAX_PARTS)] | None = None
    """how many pieces the trace has, at most 256"""
    part: Annotated[int, Meta(ge=1, le=MAX_PARTS)] | None = None
    """its number, from 1"""
    payload: Payload = None
    """a piece of the trace, a gzip file: at most 1 MiB. The agent sends 512 KiB"""

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
    """An image, a sound, a table or a histogram that the script logged ([formats](#media)). Without a payload: `left_out`."""

    name: str | None = None
    what: media.MediaKind | None = None
    index: Count | None = None
    """its place in a list"""
    caption: Annotated[str, Meta(max_length=media.MAX_CAPTION_CHARACTERS)] | None = None
    left_out: Whole | None = None
    """how many this process could not send so far"""
    payload: Payload = None
    """at most 2 MiB; needs `name` and `what`"""

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
        "What a process does, and at its start what it is.",
        {"state": (State, "[what becomes of it](exit-codes.md#states-of-a-run)")}, **_DESCRIBED,
        pipeline_stage=(Whole, "its stage of the model, from 0"), stage=(Whole, "the same, under an older name"), pid=Count,
        local_rank=(Count, "its rank on this host"), started=(float, "when the process began, Unix seconds"),
        heartbeat=(bool, "false: it may be silent while it works; any other source is lost after 30 s of silence"),
        training_after=(Whole, "the process trains another model now, after this step"),
        continues=(str, "the run in which this process continues as another source; a run without steps is deleted when all its "
                   "sources have sent this"),
        reason=(str | _REASON, "of the end: what the exception says, or a [reason](#reasons)"), exception=(str, "its class"),
        traceback=str, unused=(str, "parameters for which DistributedDataParallel waited in vain"),
        oom_kills=(Count, "processes of the host that the kernel killed for lack of memory, if a loader worker was killed"),
    ),
    "context": _data(
        "Configuration, code and environment of the job.",
        **{**_DESCRIBED, "config": (Table, "what the user set, and [what the agent found](#configuration)")},
        git=(Table, "`commit`, `branch`, `remote`, and `dirty`: tracked files differ from the commit"),
        environment=(Table, "[recorded variables](settings.md#what-a-run-records-about-its-environment)"),
        packages=(Table, "versions by name"),
    ),
    "alert": _data(
        "An alert of the script. From `perfagent run`: `level` and `unrecorded`, for which the server writes the text.",
        title=str, text=str, level=(str, "`info`, `warning` or `critical`; any other is a warning"),
        unrecorded=(Count, "processes that a script without a step has started"),
    ),
    "phase": _data(
        "A phase that is not part of every step, such as `checkpoint` or `eval`.", name=str, begin_step=Whole, duration_s=float,
    ),
    "log": _data(
        "Console output. A line that a progress bar rewrites is sent every 10 s, and when it is complete.",
        lines=(list[str], "at most 200 a second, of 500 characters"), stream=(str, "`stdout` or `stderr`"),
    ),
    "finding": FindingData,
    "profile": ProfileData,
    "stacks": _data(
        "What every thread does: for a command or, with `look`, in a pause longer than any before.",
        command=(str, "the id of the command"), step=(Whole, "the last complete one"), why=(str, "the reason for the command"),
        threads=(_list_of(_THREAD | Cut), "the training thread first"), look=(Count, "its number in this pause, from 1"),
        quiet_s=(float, "this pause"), longest_s=(float, "the longest before"),
        within=(str, "`checkpoint`, `eval`, `rollout`, or `workers` that start"),
        goes_on=(str, "signs of work since the look before: `hooks`, `moves bytes`, `computes`, `unsure`, or empty"),
        others=(dict[str, str], "other ranks on this machine: `stopped`, `gone`, `runs` or `stands`"),
    ),
    "collectives": _data(
        "What this rank called last in each process group, by torch's flight recorder; a second after the `stacks` of a pause.",
        step=Whole, groups=_list_of(_PROCESS_GROUP), complete=(bool, "the recorder has overwritten none"),
    ),
    "gpu": _data(
        "The GPUs of the process, and what happens to them.",
        what=(str, "`found` (with `driver`, `gpus`), `unavailable` (`reason`), `lost` (`index`, `reason`) or `xid` (`index`, "
              "`code`, `meaning`)"),
        driver=(str, "its version"), gpus=_list_of(_GPU), index=Count, uuid=str,
        reason=(str, "`no_driver`, `no_package`, `no_device`, `driver_hangs`, `apple`, or NVML's own words"), code=Whole,
        meaning=str,
    ),
    "memory": _data(
        "What fills the memory of the device, in bytes.", **_MEMORY,
        activations_and_other=(float, "at the peak; only where torch can query the allocator"),
        groups=(_list_of(_data("", **_MEMORY, name=str, numbers=(Whole, "of parameters"), lr=float) | Cut),
                "the same for each parameter group"),
    ),
    "parameters": _data(
        "Parameters that do not learn.",
        what=(str, "`unmoved` (trainable and in the optimizer, but unchanged), `unoptimized` (gradients, but no optimizer), "
              "`without_gradient` (none of the optimizer's has one) or `uncleared` (backward adds to those of the step before)"),
        share=(float, "of the trainable numbers; 0: it is over"), names=(list[str], "the largest 20"),
        count=(Whole, "how many tensors"), of=(Whole, "of how many"), numbers=(Whole, "in these tensors"),
        without_gradient=(Whole, "how many of the unmoved have no gradient"),
        without_rate=(Whole, "how many of the unmoved have a learning rate of 0"), steps=(Whole, "in which they were unmoved"),
    ),
    "command": _data(
        "What became of a [command](#commands).",
        {"command": (str, "its id"), "state": Literal["accepted", "done", "refused"]}, kind=str,
        why=(_REASON, "the [reason](#reasons), if refused or cut short"), message=(str, "the same in words, from older agents"),
        profile=(str, "the id of the profile"), step=(Whole, "of `stop`: the last step"), saves=(bool, "of `stop`"),
    ),
    "loss": _data(
        "How the loss is computed, from autograd's graph.", kind=(str, "`cross_entropy`, `mse` ..."), classes=Whole,
        mean=(bool, "averaged over the batch"), fed_by=(str, "`softmax` or `sigmoid`, where the loss takes logits"),
        broadcast=(list[list[Whole]], "shapes of the prediction, and of prediction minus target, where they were broadcast"),
    ),
    "sync": _data(
        "Lines that made the host wait for the device in one sampled step or, without a device, read single values of tensors.",
        lines=(_list_of(_LINE), "20 at most"), looks=Whole,
    ),
    "lines": _data(
        "Where the training thread was outside of all phases, once a minute; only if it was there in 15 % of the samples.",
        lines=_list_of(_LINE), looks=(Whole, "how many samples, about seven a second"),
    ),
    "compile": _data(
        "torch.compile compiled a function again. At most 100 for a run, and 20 with `limit_reached`.", function=str,
        line=(str, "such as `model.py:42`"), seconds=float,
        reason=(str, "the guard that failed: `tensor 'x' size mismatch at index 1. expected 128, actual 131`"),
        limit_reached=(bool, "it was not compiled, and runs uncompiled for such inputs"), limit=(Whole, "how many may be"),
    ),
    "left_out": _data(
        "The script logged more names than a run may have.", limit=Whole,
        names=(list[str], "the first 10 whose samples are left out"), count=(Whole, "how many; 10,000 stands for any more"),
    ),
    "thread": _data(
        "An exception ended a thread of the script; at most 8 of a run. `step` is the last complete one.", name=str,
        reason=(str, "the exception and its text"),
        training=(bool, "it is the thread that trains"), frames=(list[str], "as in `stacks`"),
    ),
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
