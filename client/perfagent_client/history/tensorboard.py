"""Reads the scalars of TensorBoard event files, without TensorBoard. A folder is a run, with the sub-folders that torch's
`add_hparams` and `add_scalars` make beside its writer's file.

A file holds records (TFRecord: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details), each one an
`Event` message (https://github.com/tensorflow/tensorboard/tree/master/tensorboard/compat/proto).
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from perfagent_client.history.crc32c import checksums, crc32c
from perfagent_client.history.left_out import cut, damaged, not_numbers
from perfagent_client.history.old_run import OldRun, Source
from perfagent_client.history.protobuf import UNREADABLE, Message, fields, signed, varint
from perfagent_client.history.rows import head_of
from perfagent_client.history.yaml_file import yaml_mapping

__all__ = ["sources"]

_BATCH_BYTES = 1 << 23
_KINDS = {3: "histogram", 4: "image", 5: "histogram", 6: "audio clip"}
"""Fields of a `Summary.Value` that hold no number."""
_PLUGIN_KINDS = {"histograms": "histogram", "images": "image", "audio": "audio clip", "text": "text"}
_SCALARS = ("", "scalars")
"""Plugins whose tensors of one element are scalars; a tag's first value names its plugin."""
_CONTENT = {1: "f", 2: "d", 3: "i", 4: "B", 5: "h", 6: "b", 9: "q", 10: "?", 17: "H", 19: "e"}
"""`DataType` -> how struct reads one element; bfloat16 (14) is the upper half of a float."""
_BFLOAT16, _HALF = 14, 19
_FLOATS = {5: "<f", 6: "<d"}
_FLOAT, _TIME = struct.Struct("<f"), struct.Struct("<d")
_INTEGERS = (7, 10, 11, 13)
"""Fields of a `TensorProto` that hold packed varints; 13: the bits of float16 and bfloat16."""


_HEAD_BYTES = 1 << 16
_HPARAMS = {"_hparams_/experiment", "_hparams_/session_start_info"}
"""Tags by which torch's `add_hparams` begins a file; a run of its own has the second alone."""


def sources(folder: Path, files: Sequence[Path]) -> Iterator[Source]:
    """All event files of a folder are one run: a restart, and each further writer, begins one of its own."""
    events = _events(files)
    if events:
        settings = [file for file in files if file.name == "hparams.yaml"]  # Lightning's
        beside = dict(_written_beside(folder))
        yield Source("tensorboard", (*events, *settings, *beside), partial(_read, folder, events, settings, beside))


def _events(files: Iterable[Path]) -> list[Path]:
    return [file for file in files if "tfevents" in file.name and file.stat().st_size]


def _written_beside(folder: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Files in sub-folders that belong to the run of this one, with what stands there before a tag, and behind it."""
    for inside in sorted(one for one in folder.iterdir() if one.is_dir() and not one.is_symlink()):
        try:
            files = _events(sorted(inside.iterdir()))
        except OSError:  # whoever looks into it says so
            continue
        for file in files:
            tags = _first_tags(file)
            name = next(iter(tags), "")
            before = name.replace("/", "_") + "_"
            if tags.keys() == {name} and inside.name.startswith(before):
                yield file, ("", "/" + inside.name.removeprefix(before))
            elif tags.keys() >= _HPARAMS and max(tags.values()) == 1 and file.stat().st_size <= _HEAD_BYTES:
                yield file, ("hparams/", "")


def _first_tags(file: Path) -> Counter[str]:
    """How often each stands in its first bytes."""
    head, at = head_of(file, _HEAD_BYTES), 0
    tags: Counter[str] = Counter()
    with suppress(*UNREADABLE):
        while 0 < (size := int.from_bytes(head[at : at + 8], "little")) < len(head) - at:
            summary = Message(head[at + 12 : at + 12 + size]).message(5)
            tags.update(Message(value).text(1) for value in summary.every(1))
            at += size + 16
    return tags


def _read(
    folder: Path, events: list[Path], settings: list[Path], beside: Mapping[Path, tuple[str, str]]
) -> Iterator[OldRun]:
    folder = folder.resolve()
    run = OldRun(source=f"tensorboard:{folder}", name=f"{folder.parent.name}/{folder.name}".lstrip("/"))
    summaries = _Summaries(run)
    for path in events:
        for record in _records(path, run.left_out):
            summaries.add(record)
    for path, (before, after) in beside.items():
        its = _Summaries(other := OldRun(run.source, run.name))
        for record in _records(path, run.left_out):
            its.add(record)
        run.config |= other.config
        run.series |= {f"{before}{tag}{after}": samples for tag, samples in other.series.items()}
        summaries.kinds += its.kinds
    for path in settings:
        run.config = yaml_mapping(path, run.left_out) or run.config
    run.left_out += not_numbers(summaries.kinds)
    yield run


def _records(path: Path, left_out: list[str]) -> Iterator[bytes]:
    """Those with the right checksum."""
    bad = 0
    for batch in _batches(_framed(path, left_out)):
        for record, checksum in zip(batch, checksums([record[:-4] for record in batch]), strict=True):
            if _masked(checksum) == int.from_bytes(record[-4:], "little"):
                yield record[:-4]
            else:
                bad += 12 + len(record)
    if bad:
        left_out.append(damaged(path, bad))


def _batches(records: Iterator[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    held = 0
    for record in records:
        batch.append(record)
        held += len(record)
        if held > _BATCH_BYTES:
            yield batch
            batch, held = [], 0
    yield batch


def _framed(path: Path, left_out: list[str]) -> Iterator[bytes]:
    """Records with their checksum at the end. Behind a wrong length nothing says where the next one begins."""
    left = path.stat().st_size
    with path.open("rb") as file:
        while left:
            head = file.read(12)
            length = _length(head) if len(head) == 12 else 0
            if length < 0:
                left_out.append(damaged(path, left))
                return
            if 12 + length + 4 > left:
                left_out.append(cut(path, left))
                return
            yield file.read(length + 4)
            left -= 12 + length + 4


@lru_cache(1024)
def _length(head: bytes) -> int:
    """-1 where its checksum is wrong."""
    return int.from_bytes(head[:8], "little") if _masked(crc32c(head[:8])) == int.from_bytes(head[8:], "little") else -1


def _masked(checksum: int) -> int:
    """TFRecord's: a record may hold checksums itself."""
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFF_FFFF


class _Summaries:
    """Puts the values of events into a run."""

    def __init__(self, run: OldRun) -> None:
        self._run = run
        self._plugins: dict[bytes, str] = {}
        self._known: dict[bytes, str] = {}
        """Nearly all records are one float: what stands between its step and the float -> its series."""
        self.kinds: Counter[str] = Counter()

    def add(self, event: bytes) -> None:
        try:
            if event[:1] == b"\x09" and event[9:10] == b"\x10" and self._run.started is not None:
                step, begin = varint(event, 10)
                name = self._known.get(event[begin:-4])
                if name is not None and step < 1 << 63:
                    self._run.add(
                        name, step, _FLOAT.unpack_from(event, len(event) - 4)[0], _TIME.unpack_from(event, 1)[0]
                    )
                    return
                with suppress(*UNREADABLE):
                    self._learn(event[begin:])
            self._event(event)
        except UNREADABLE:  # another program wrote it: its checksum is right
            self.kinds["unreadable record"] += 1

    def _learn(self, rest: bytes) -> None:
        """Where this is a summary of one float and its tag, others like it differ in the float alone."""
        parts = list(fields(rest))
        values = list(fields(parts[0][1])) if [number for number, _ in parts] == [5] else []
        one = list(fields(values[0][1])) if [number for number, _ in values] == [1] else []
        if (
            [number for number, _ in one] == [1, 2]
            and self._plugins.get(tag := one[0][1]) != "hparams"
            and len(one[1][1]) == 4
        ):
            self._known[rest[:-4]] = tag.decode(errors="replace")

    def _event(self, event: bytes) -> None:
        step, at, summary = 0, math.nan, b""
        for number, content in fields(event):
            if number == 5:
                summary = content
            elif number == 1:
                (at,) = struct.unpack("<d", content)
            elif number == 2:
                step = signed(content)
        if self._run.started is None and math.isfinite(at):
            self._run.started = at
        for number, content in fields(summary):
            if number == 1:
                self._value(content, step, at)

    def _value(self, message: bytes, step: int, at: float) -> None:
        tag, value, tensor, kind = b"", None, b"", ""
        for number, content in fields(message):
            if number == 1:
                tag = content
            elif number == 2:
                (value,) = struct.unpack("<f", content)
            elif number == 8:
                tensor = content
            elif number == 9:
                self._metadata(tag, Message(content).message(1))
            elif number in _KINDS:
                kind = _KINDS[number]
        plugin = self._plugins.get(tag, "")
        if plugin == "hparams":
            return
        if tensor and plugin in _SCALARS:
            value = _element(tensor)
        if value is None:
            self.kinds[kind or _PLUGIN_KINDS.get(plugin, "tensor")] += 1
        elif step < 0:
            self.kinds["negative step"] += 1
        else:
            self._run.add(tag.decode(errors="replace"), step, value, at)

    def _metadata(self, tag: bytes, plugin_data: Message) -> None:
        plugin = self._plugins.setdefault(tag, plugin_data.text(1))
        self._known.clear()
        if plugin == "hparams":
            session = plugin_data.message(2).message(3)
            for entry in map(Message, session.every(1)):
                self._run.config[entry.text(1)] = _setting(entry.message(2))


def _setting(value: Message) -> Any:
    """Of a `google.protobuf.Value`."""
    if 2 in value:
        return struct.unpack("<d", value.bytes(2))[0]
    return bool(value.integer(4)) if 4 in value else value.text(3) if 3 in value else None


def _element(tensor: bytes) -> float | None:
    """Of a `TensorProto` with one number; None for any other."""
    kind, size, found = 0, 1, None
    for number, content in fields(tensor):
        if number == 1:
            kind = content
        elif number == 2:
            for dimension in Message(content).every(2):
                size *= Message(dimension).integer(1)
        elif number == 4 or number in _FLOATS or number in _INTEGERS:
            found = number, content
    if found is None or size != 1:
        return None
    number, content = found
    if number in _FLOATS:
        return float(struct.unpack(_FLOATS[number], content)[0])
    if number in _INTEGERS:
        bits = varint(content, 0)[0] if isinstance(content, bytes) else content
        if kind not in (_HALF, _BFLOAT16):
            return float(signed(bits))
        content = bits.to_bytes(2, "little")
    if kind == _BFLOAT16:
        return float(struct.unpack("<f", b"\0\0" + content)[0])
    return float(struct.unpack(f"<{_CONTENT[kind]}", content)[0]) if kind in _CONTENT else None
