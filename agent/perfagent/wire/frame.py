"""The frame that an agent sends: columns of samples and a list of events, as one MessagePack message.

A frame belongs to one source (one process of one attempt) and carries that source's sequence number; (source, seq) is
the identity by which the server stores a frame exactly once. Columns travel as little-endian bytes, so NaN and
infinities are ordinary values and no number is ever rounded on the way.

This module must stay light (standard library and msgspec only): it is imported in every training process.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from perfagent.errors import WireError

__all__ = [
    "EVENT_KINDS", "MAX_DECODED_BYTES", "MAX_NAME_BYTES", "MAX_SENT_BYTES", "WIRE_VERSION", "Event", "Frame", "Group", "decode",
    "encode",
]  # fmt: skip

WIRE_VERSION = 1
MAX_SENT_BYTES = 8 * 2**20
MAX_DECODED_BYTES = 32 * 2**20
MAX_NAME_BYTES = 256
EVENT_KINDS = (
    "state", "context", "alert", "phase", "log", "finding", "profile", "stacks", "collectives", "gpu", "memory", "parameters",
    "command", "loss", "sync", "lines", "compile", "left_out", "thread", "media", "import",
)  # fmt: skip

Column = bytes | Sequence[float] | Sequence[int]


class Group(msgspec.Struct):
    """Samples that share their rows: `values[name][i]` was measured at `step[i]`, `time[i]`, `monotonic[i]`.

    Columns are little-endian bytes; sequences of numbers and arrays with `tobytes` are packed on construction (integers
    into step, everything else into float64 unless the array itself is float32). A name that is absent in a row belongs
    into another group: NaN is always a value.

    Raises WireError when the columns differ in length or are no whole number of items.
    """

    step: bytes
    """int64"""
    time: bytes
    """float64, Unix seconds"""
    monotonic: bytes
    """float64, seconds of the source's monotonic clock"""
    values: dict[str, bytes] = {}
    """by the name of the series: float32 (4 bytes a row) or float64 (8)"""

    def __post_init__(self) -> None:
        if type(self.step) is not bytes:
            self.step = _pack("q", self.step)
        if type(self.time) is not bytes:
            self.time = _pack("d", self.time)
        if type(self.monotonic) is not bytes:
            self.monotonic = _pack("d", self.monotonic)
        rows, rest = divmod(len(self.step), 8)
        if rest or len(self.time) != 8 * rows or len(self.monotonic) != 8 * rows:
            raise WireError(
                f"group columns differ in length: step has {len(self.step)} bytes, time {len(self.time)}, monotonic "
                f"{len(self.monotonic)}; each must be 8 bytes a row"
            )
        for name, column in self.values.items():
            if type(column) is not bytes:
                column = self.values[name] = _pack("d", column)  # noqa: PLW2901 - the packed one from here on
            if len(column) not in (4 * rows, 8 * rows):
                raise WireError(
                    f"column {name[:80]!r} has {len(column)} bytes for {rows} rows; 4 or 8 bytes a row are allowed"
                )

    @property
    def rows(self) -> int:
        return len(self.step) // 8

    @property
    def samples(self) -> int:
        return self.rows * len(self.values)

    @property
    def size_bytes(self) -> int:
        """Bytes of all columns."""
        return 3 * len(self.step) + sum(map(len, self.values.values()))

    def steps(self) -> array[int]:
        """int64 (rows,)."""
        return _unpack("q", self.step)

    def times(self) -> array[float]:
        """float64 (rows,), Unix seconds."""
        return _unpack("d", self.time)

    def monotonics(self) -> array[float]:
        """float64 (rows,), seconds of the source's monotonic clock."""
        return _unpack("d", self.monotonic)

    def column(self, name: str) -> array[float]:
        """float32 or float64 (rows,), as it was sent. Raises KeyError for a name that is not in this group."""
        raw = self.values[name]
        return _unpack("d" if len(raw) == 8 * self.rows else "f", raw)


class Event(msgspec.Struct, kw_only=True):
    """Something that happened once."""

    kind: str
    """such as `state`: one of EVENT_KINDS"""
    time: float
    """Unix seconds"""
    step: int | None = None
    """the step in which it happened"""
    monotonic: float | None = None
    """the source's monotonic clock, in seconds"""
    data: dict[str, Any] = {}
    """by kind"""


class Frame(msgspec.Struct, kw_only=True):
    """One delivery of one source."""

    project: str
    """the project of the run"""
    run: str
    """the run's id"""
    source: str
    """a unique id of the sending process"""
    attempt: int
    """which start of the job: an increasing integer. The agent takes the start of rank 0 in Unix milliseconds"""
    rank: int
    """the global rank"""
    seq: int
    """the source's number of this frame, from 1. The server stores each pair (`source`, `seq`) once"""
    groups: list[Group] = []
    """samples"""
    events: list[Event] = []
    """what happened once, at a moment"""
    name: str | None = None
    """the run's name, if the user gave one"""
    sent: float | None = None
    """the sender's clock at sending, Unix seconds: the server detects a wrong clock"""
    relayed: bool = False
    """the source is dead, and another process sends what it left: no sign of life"""
    version: int = WIRE_VERSION
    """the server refuses others"""

    @property
    def samples(self) -> int:
        return sum(group.samples for group in self.groups)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)
_version_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


def encode(frame: Frame) -> bytes:
    """MessagePack bytes of a frame. Raises WireError for text that is not valid Unicode or numbers beyond 64 bits."""
    try:
        return _encoder.encode(frame)
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError, RecursionError) as error:
        raise WireError(f"frame {frame.source}:{frame.seq} cannot be encoded: {error}") from error


def decode(data: bytes | bytearray | memoryview) -> Frame:
    """The frame in MessagePack bytes.

    Unknown fields are ignored, so that an older server takes a newer agent's frames; an unknown version is refused.
    Raises WireError for anything else that is not a frame.
    """
    try:
        frame = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        version = _version_of(data)
        if version not in (None, WIRE_VERSION):
            raise WireError(_unknown_version(version)) from error
        raise WireError(f"this is not a frame of wire version {WIRE_VERSION}: {error}") from error
    if frame.version != WIRE_VERSION:
        raise WireError(_unknown_version(frame.version))
    return frame


def _version_of(data: bytes | bytearray | memoryview) -> object:
    try:
        return msgspec.msgpack.decode(_version_decoder.decode(data)["version"])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, KeyError):
        return None


def _unknown_version(version: object) -> str:
    ours = f"this side speaks version {WIRE_VERSION}"
    return f"wire version {version!r} is not known here; {ours}: upgrade the older of agent and server"


def _pack(code: str, values: Any) -> bytes:
    """Little-endian bytes of a sequence of numbers, or of an array that knows its own bytes (numpy, array.array)."""
    dtype = getattr(values, "dtype", None)
    if dtype is not None:  # numpy: keep float32, bring everything else to the column's type
        keep = code == "d" and str(dtype) == "float32"
        return bytes(values.astype("<f4" if keep else {"q": "<i8", "d": "<f8"}[code]).tobytes())
    if isinstance(values, (bytearray, memoryview)):
        return bytes(values)
    if isinstance(values, array) and values.typecode in (code, "f"):
        return values.tobytes()
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise WireError(f"a column must be bytes or a sequence of numbers, not {type(values).__name__}")
    return array(code, values).tobytes()


def _unpack(code: str, data: bytes) -> array[Any]:
    values: array[Any] = array(code)
    values.frombytes(data)
    return values
