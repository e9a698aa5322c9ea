"""Reads the local files of W&B, `wandb/offline-run-*` and `wandb/run-*`, without W&B.

`run-ID.wandb` is a log in LevelDB's format (https://github.com/google/leveldb/blob/main/doc/log_format.md) with a header of
7 bytes and zlib's CRC-32; its records are messages `Record`
(https://github.com/wandb/wandb/blob/main/wandb/proto/wandb_internal.proto).
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from perfagent_client.history.left_out import cut, damaged, not_numbers
from perfagent_client.history.old_run import OldRun, Source
from perfagent_client.history.protobuf import UNREADABLE, Message, fields
from perfagent_client.history.wandb_axes import Axes
from perfagent_client.history.yaml_file import yaml_mapping

__all__ = ["sources"]

_HEADER = b":W&B\xe1\xbe\x00"
_BLOCK = 32_768
_DAMAGED, _FULL, _FIRST, _MIDDLE, _LAST, _CUT = range(6)
"""Kinds of chunks; the first and the last are ours."""
_FOLDER = re.compile(r"(?:offline-)?run-\d{8}_\d{6}-.+")
_VALUE_JSON = b"\x82\x01"
"""How field 16 begins in a message. No JSON contains it."""
_CONSOLE_LINES, _CONSOLE_PIECES = 1000, 20_000
_OF_ROW = ("_runtime", "_wandb")
"""Keys that W&B adds to a row, beside its `_step` and `_timestamp`."""
_KINDS = {str: "text", list: "list", type(None): "null"}
_ENVIRONMENT = {1: "os", 2: "python", 6: "program", 12: "host", 18: "gpu", 25: "cudaVersion"}
"""Fields of an `EnvironmentRecord` -> their keys in wandb-metadata.json, which versions before 0.20 have instead."""


def sources(folder: Path, files: Sequence[Path]) -> Iterator[Source]:
    """The logs of one id are one run: whoever resumes a run gets one more, in a folder of its own."""
    folders = [one for one in folder.iterdir() if _FOLDER.fullmatch(one.name) and one.is_dir()]
    logs = [file for file in files if file.suffix == ".wandb"]
    logs += [log for inside in folders for log in inside.glob("run-*.wandb")]
    runs: dict[str, list[Path]] = {}
    for log in sorted(logs, key=lambda log: log.parent.name.removeprefix("offline-")):
        if log.stat().st_size:
            runs.setdefault(log.name, []).append(log)
    for several in runs.values():
        around = {log.parent for log in several} - {folder} or {folder / "files", folder / "logs"}
        yield Source("wandb", (*several, *sorted(around)), partial(_read, several))


def _read(logs: list[Path]) -> Iterator[OldRun]:
    runs: dict[str, _Run] = {}
    for log in logs:
        identifier = log.stem.removeprefix("run-")
        source = f"wandb:{_project(log)}/{identifier}"
        runs.setdefault(source, _Run(OldRun(source=source, name=identifier))).read(log)
    for run in runs.values():
        yield run.whole()


def _project(log: Path) -> str:
    """The record of the run is among the first: an id is one project's."""
    for record in islice(_records(log, []), 10):
        with suppress(*UNREADABLE):
            if project := Message(record).message(17).text(3):
                return project
    return ""


def _records(log: Path, left_out: list[str]) -> Iterator[bytes]:
    parts: list[bytes] = []
    bad, missing = 0, b""
    for kind, chunk in _chunks(log, left_out):
        if kind == _CUT:
            missing = chunk
        elif kind in (_MIDDLE, _LAST) and parts:
            parts.append(chunk)
        else:
            begins = kind in (_FULL, _FIRST)
            bad += sum(map(len, parts)) + (0 if begins else len(chunk))
            parts = [chunk] if begins else []
        if kind in (_FULL, _LAST) and parts:
            yield b"".join(part[7:] for part in parts)
            parts = []
    if bad:
        left_out.append(damaged(log, bad))
    if missing or parts:
        left_out.append(cut(log, len(missing) + sum(map(len, parts))))


def _chunks(log: Path, left_out: list[str]) -> Iterator[tuple[int, bytes]]:
    """Kind of each, and its bytes with their header of 7. Behind a wrong checksum, the next block is the first place to go on."""
    with log.open("rb") as file:
        block, at = file.read(_BLOCK), len(_HEADER)
        if block[:at] != _HEADER:
            left_out.append(f"{log.name} begins with {block[:at]!r}: it is not W&B's, or of an unknown version")
            return
        while block:
            while at + 7 <= len(block):
                checksum, length, kind = struct.unpack_from("<IHB", block, at)
                end = at + 7 + length
                if end > len(block) < _BLOCK or not (checksum or length or kind):
                    break
                if end > _BLOCK or zlib.crc32(block[at + 6 : end]) != checksum:
                    yield _DAMAGED, block[at:]
                    at = _BLOCK
                    break
                yield kind, block[at:end]
                at = end
            if block[at:].strip(b"\0"):
                yield _DAMAGED if len(block) == _BLOCK else _CUT, block[at:]
            block, at = file.read(_BLOCK), 0


class _Run:
    """Puts the records of one run's logs together."""

    def __init__(self, run: OldRun) -> None:
        self._run = run
        self._names: dict[bytes, str] = {}
        self._kinds: Counter[str] = Counter()
        self._console: deque[str] = deque(maxlen=_CONSOLE_PIECES)
        self._summary: dict[str, Any] = {}
        self._axes = Axes()
        self._next_step = 0
        self._began, self._last = 0.0, math.nan
        self._takers: dict[int, Callable[[Message], None]] = {
            3: partial(_update, self._summary),
            5: partial(_update, run.config),
            7: self._statistics,
            8: lambda _: self._kinds.update(["artifact"]),
            12: self._axis,
            13: lambda record: self._console.append(record.text(3)),
            17: self._about,
            18: self._exit,
            26: self._environment,
        }

    def read(self, log: Path) -> None:
        self._run.state = ""
        for record in _records(log, self._run.left_out):
            try:
                self._record(record)
            except UNREADABLE:  # another program wrote it: its checksum is right
                self._kinds["unreadable record"] += 1
        self._beside(log.parent / "files")

    def whole(self) -> OldRun:
        run = self._run
        run.config.pop("_wandb", None)
        if summary := {key: value for key, value in self._summary.items() if not key.startswith("_")}:
            run.meta["summary"] = summary
        lines = "".join(self._console).replace("\r\n", "\n").split("\n")
        run.console = [line.rpartition("\r")[2] for line in lines if line][-_CONSOLE_LINES:]
        self._axes.settle(run.series)
        run.left_out += not_numbers(self._kinds)
        return run

    def _axis(self, record: Message) -> None:
        if (name := record.text(1) or record.text(2)) and (axis := record.text(4)):
            self._axes.defined[name] = axis

    def _record(self, record: bytes) -> None:
        for number, content in fields(record):
            if number == 2:
                self._history(content)
            elif number in self._takers:
                self._takers[number](Message(content))

    def _history(self, message: bytes) -> None:
        """A row. Where versions after 0.31 write no step, it is the next one."""
        row: dict[str, bytes] = {}
        step = self._next_step
        for number, content in fields(message):
            if number == 1:
                name, text = self._item(content)
                row[name] = text
            elif number == 2:
                step = Message(content).integer(1)
        if (written := _number(row.pop("_step", b""))) is not None:
            step = int(written)
        if step < 0:
            raise ValueError("a step below 0")
        at = _number(row.pop("_timestamp", b""))
        self._last = self._last if at is None else at
        self._next_step = step + 1
        place = len(self._axes.own)
        self._axes.own.append(step)
        media = [name.removesuffix("_type") for name in row if name.endswith("._type")] if b"_type" in message else []
        self._kinds.update(json.loads(row[f"{name}_type"]) for name in media)
        for name, text in row.items():
            if name not in _OF_ROW and not (media and name.startswith(tuple(media))):
                self._add(name, text, place, math.nan if at is None else at)

    def _item(self, message: bytes) -> tuple[str, bytes]:
        """Name and JSON. What stands before the JSON is the same in each row, so that names are read once."""
        before, _, sized = message.rpartition(_VALUE_JSON)
        name = self._names.get(before)
        if name is not None and sized and sized[0] == len(sized) - 1:
            return name, sized[1:]
        path, text = _keyed(message)
        name = ".".join(path)
        if before and sized[1:] == text:
            self._names[before] = name
        return name, text

    def _add(self, name: str, text: bytes, row: int, at: float) -> None:
        value = _number(text)
        if value is not None:
            self._run.add(name, row, value, at)
        else:
            self._parts(name, json.loads(text, parse_int=float), row, at)

    def _parts(self, name: str, value: Any, row: int, at: float) -> None:
        """W&B, too, shows the parts of a mapping as series of their own, by names with dots."""
        if isinstance(value, dict) and "_type" not in value:
            for key, part in value.items():
                self._parts(f"{name}.{key}", part, row, at)
        elif isinstance(value, (bool, float)):
            self._run.add(name, row, float(value), at)
        else:
            kind = value["_type"] if isinstance(value, dict) else _KINDS[type(value)]
            self._kinds[str(kind)] += 1

    def _statistics(self, record: Message) -> None:
        """Measurements of the machine, which W&B names `system.…`; they belong to a time, and get the newest step."""
        at, row = _seconds(record.message(2)), len(self._axes.own) - 1
        for item in record.every(3):
            name, text = self._item(item)
            self._add(f"system.{name}", text, row, at)

    def _about(self, record: Message) -> None:
        run = self._run
        run.name, run.project = record.text(8) or run.name, record.text(3) or run.project
        run.group, run.notes, run.tags = (
            record.text(6) or run.group,
            record.text(9) or run.notes,
            record.texts(10) or run.tags,
        )
        self._note(entity=record.text(2), job_type=record.text(7), sweep=record.text(12), host=record.text(13))
        self._note(git=_git(record.message(21)))
        _update(run.config, record.message(4))
        _update(self._summary, record.message(5))
        if 17 in record:
            self._began = _seconds(record.message(17))
            run.started = self._began if run.started is None else min(run.started, self._began)
        self._next_step = max(self._next_step, record.integer(14))
        if len(self._axes.own) == 1:
            self._axes.own[0] = max(0, self._next_step - 1)

    def _environment(self, record: Message) -> None:
        self._note(args=record.texts(5), git=_git(record.message(9)))
        self._note(**{key: record.text(number) for number, key in _ENVIRONMENT.items()})

    def _note(self, **facts: Any) -> None:
        self._run.meta |= {key: value for key, value in facts.items() if value}

    def _exit(self, record: Message) -> None:
        if not record.integer(3):  # else another process of the run goes on
            self._run.state = "failed" if record.integer(1) else "finished"
            self._run.ended = max(self._began + record.integer(2), self._last)

    def _beside(self, files: Path) -> None:
        """What the log does not hold, from the files beside it."""
        run = self._run
        if not run.config and (settings := files / "config.yaml").exists():
            config = yaml_mapping(settings, run.left_out)
            run.config |= {key: one["value"] for key, one in config.items() if isinstance(one, dict) and "value" in one}
        if (metadata := files / "wandb-metadata.json").exists():
            try:
                read = json.loads(metadata.read_bytes())
                kept = [key for key in (*_ENVIRONMENT.values(), "args", "git") if read.get(key)]
                run.meta = {key: read[key] for key in kept} | run.meta
            except (ValueError, AttributeError) as error:
                run.left_out.append(f"{metadata.name} is no JSON: {error}")
        if not self._console and (output := files / "output.log").exists():
            self._console.append(output.read_text(errors="replace"))


def _number(text: bytes) -> float | None:
    """Of JSON as Python writes it: its numbers, NaN and Infinity are also Python's."""
    try:
        return float(text)
    except ValueError:
        return {b"true": 1.0, b"false": 0.0}.get(text)


def _git(repository: Message) -> dict[str, str]:
    found = {"remote": repository.text(1), "commit": repository.text(2)}
    return {key: value for key, value in found.items() if value}


def _seconds(timestamp: Message) -> float:
    return timestamp.integer(1) + timestamp.integer(2) / 1e9


def _keyed(message: bytes) -> tuple[list[str], bytes]:
    """Of a `HistoryItem`, `ConfigItem` or `SummaryItem`: the path of its key, and its JSON."""
    path, text = [], b""
    for number, content in fields(message):
        if number in (1, 2):
            path.append(content.decode(errors="replace"))
        elif number == 16:
            text = content
    return path, text


def _update(target: dict[str, Any], record: Message) -> None:
    """By a `ConfigRecord` or a `SummaryRecord`."""
    for removed, items in ((False, record.every(1)), (True, record.every(2))):
        for item in items:
            (*above, last), text = _keyed(item)
            inside = target
            for key in above:
                if not isinstance(inside.get(key), dict):
                    inside[key] = {}
                inside = inside[key]
            if removed:
                inside.pop(last, None)
            else:
                inside[last] = json.loads(text)
