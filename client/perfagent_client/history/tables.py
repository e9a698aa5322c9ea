"""Reads tables with one row per step: JSON lines, JSON lists of objects, and CSV files of Lightning's CSVLogger, Ultralytics
(`results.csv`), Keras' CSVLogger and scripts.

A table is a run if it has a step column or a loss. Without a step column, rows are numbered. An empty cell is no value.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from perfagent.wire import is_evaluation_loss, loss_kind
from perfagent.wire.quantities import some
from perfagent_client.history.left_out import counted
from perfagent_client.history.old_run import OldRun, Source
from perfagent_client.history.recordings import EXPORT_COLUMNS
from perfagent_client.history.rows import (
    STEP_COLUMNS,
    add_row,
    flat,
    head_of,
    named,
    number,
    objects,
    pieces,
    whole_step,
)  # fmt: skip
from perfagent_client.history.yaml_file import yaml_mapping

__all__ = ["sources"]

_CSV, _JSON = (".csv", ".tsv"), (".jsonl", ".ndjson", ".json")
_DELIMITERS = ",;\t"
_LIST = re.compile(r"\s*\[(?=\s*\{)")
_SETTINGS = ("hparams.yaml", "args.yaml")
"""What Lightning and Ultralytics write beside their tables."""
_TIMES = ("time", "timestamp", "_timestamp", "wall_time", "walltime", "created_at")
_UNIX_S = (1e9, 1e11)
"""What a column of times must lie between to be Unix seconds; a thousand times that is milliseconds."""
_HEAD_BYTES = 1 << 16
_USUAL_NAMES = ("metrics", "results", "log", "logs", "training_log", "history", "progress")
"""Of files that are called as their folder's run is: then the folder's name says more."""


def sources(folder: Path, files: Sequence[Path]) -> Iterator[Source]:
    for file in files:
        kind = named(file).suffix.lower()
        if kind not in (*_CSV, *_JSON):
            continue
        head = head_of(file, _HEAD_BYTES).decode("utf-8-sig", "replace")
        if _is_run(_columns_of(head) if kind in _CSV else _keys(head, kind)):
            yield Source("table", (file,), partial(_read, file, folder))


def _columns_of(head: str) -> list[str]:
    first = head.partition("\n")[0]
    try:
        return [name.strip() for name in next(csv.reader([first], delimiter=_delimiter(first)), [])]
    except csv.Error:
        return []


def _delimiter(first: str) -> str:
    """Programs of countries that write 0,5 put `;` between cells."""
    return max(_DELIMITERS, key=first.count)


def _keys(head: str, kind: str) -> list[str]:
    """Of the first rows: the very first may be about the run as a whole. Those of other values than numbers are left out."""
    begin = _LIST.match(head)
    if begin:
        rows = objects(head, begin.end())[0][:20]
    else:
        rows = [_object(line) for line in head.split("\n")[:20]] if kind != ".json" else []
    return list(
        dict.fromkeys(
            name for row in rows for name, value in flat(row or {}) if value in (None, "") or number(value) is not None
        )
    )


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _is_run(head: Sequence[str]) -> bool:
    if {*EXPORT_COLUMNS[1:]} <= {*head[:5]} or len(head) < 2:
        return False
    return _step_column(head) is not None or any(loss_kind(name) or is_evaluation_loss(name) for name in head)


def _step_column(names: Iterable[str]) -> str | None:
    by_name = {name.lower(): name for name in reversed(list(names))}
    return next((by_name[one] for one in STEP_COLUMNS if one in by_name), None)


def _read(file: Path, folder: Path) -> Iterator[OldRun]:
    name = named(file).stem
    usual = name.lower() in _USUAL_NAMES
    run = OldRun(f"table:{file.resolve()}", folder.resolve().name if usual else name)
    for settings in (folder / name for name in _SETTINGS) if usual else ():
        if settings.is_file():
            run.config |= yaml_mapping(settings, run.left_out)
    others: Counter[str] = Counter()
    text = b"".join(pieces(file, run.left_out)).decode("utf-8-sig", "replace")
    if named(file).suffix.lower() in _CSV:
        _read_csv(run, text, others)
    else:
        _read_objects(run, text, others)
    run.left_out = counted(others) + run.left_out
    if run.series:
        yield run


def _read_csv(run: OldRun, text: str, others: Counter[str]) -> None:
    text = text.replace("\0", "")
    end = text.rfind("\n") + 1  # what comes after it may be cut in the middle of a number
    if text[end:].strip():
        run.left_out.append(f"the last {some(len(text[end:].encode()), 'byte')} are no whole row")
    first, _, body = text[:end].partition("\n")
    delimiter = _delimiter(first)
    if delimiter == ";" and "." not in body:
        body = body.replace(",", ".")
    head, rows = _columns_of(first), list[dict[str, Any]]()
    names = [
        name if head.index(name) == at else "" for at, name in enumerate(head)
    ]  # of several with one name, the first
    try:
        for row in csv.reader(io.StringIO(body, newline=""), delimiter=delimiter):
            if len(row) == len(names):
                rows.append({name: cell.strip() for name, cell in zip(names, row, strict=True) if name})
            elif row:
                others["rows with another number of cells than the head"] += 1
    except csv.Error:
        others["places at which this is no CSV any more; the rest"] += 1
    _add_rows(run, rows, others)


def _read_objects(run: OldRun, text: str, others: Counter[str]) -> None:
    if begin := _LIST.match(text):
        found, end = objects(text, begin.end())
        if text[end:].strip() != "]":
            run.left_out.append(
                f"the last {some(len(text[end:].encode()), 'byte')} are no whole JSON objects of the list"
            )
    else:
        read = [_object(line) for line in text.split("\n") if line.strip()]
        found = [row for row in read if row is not None]
        if len(read) > len(found):
            others["lines that are no whole JSON objects"] = len(read) - len(found)
    _add_rows(run, [dict(flat(row)) for row in found], others)


def _add_rows(run: OldRun, rows: list[dict[str, Any]], others: Counter[str]) -> None:
    names = dict.fromkeys(name for row in rows for name in row)
    counted = _step_column(names)
    if rows and counted is None:
        run.left_out.append("nothing counts the steps: rows are counted")
    clock, per_second = _clock(names, rows)
    for place, row in enumerate(rows, 1):
        step = place if counted is None else whole_step(row.get(counted))
        if step is None:
            others["rows without a whole step"] += 1
            continue
        time = number(row.get(clock))
        values = ((name, value) for name, value in row.items() if name not in (counted, clock))
        add_row(run, step, values, others, math.nan if time is None else time / per_second)


def _clock(names: Iterable[str], rows: list[dict[str, Any]]) -> tuple[str, float]:
    """The field that has times of day, and how many of them are a second."""
    for name in (name for name in names if name.lower() in _TIMES):
        values = [value for row in rows if (value := number(row.get(name))) is not None]
        per_second = _per_second(values)
        if per_second:
            return name, per_second
    return "", math.nan


def _per_second(values: Sequence[float]) -> float:
    """1 for Unix seconds, 1000 for milliseconds, 0 for what is neither."""
    known = [value for value in values if math.isfinite(value)]
    units = (each for each in (1.0, 1000.0) if all(_UNIX_S[0] <= value / each < _UNIX_S[1] for value in known))
    return next(units, 0.0) if known else 0.0
