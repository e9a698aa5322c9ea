"""Reads tables with one row per step: JSON lines, and CSV files of Lightning's CSVLogger, Ultralytics (`results.csv`), Keras'
CSVLogger and scripts.

A table is a run if it has a step column or a loss. Without a step column, rows are numbered. An empty cell is no value.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from perfagent.plural import some
from perfagent.wire import is_evaluation_loss, loss_kind
from perfagent_client.history.left_out import counted
from perfagent_client.history.old_run import OldRun, Source
from perfagent_client.history.recordings import EXPORT_COLUMNS
from perfagent_client.history.rows import STEP_COLUMNS, add_row, flat, head_of, number, whole_step

__all__ = ["sources"]

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = (".jsonl", ".ndjson")
_TIMES = ("time", "timestamp", "_timestamp", "wall_time", "walltime", "created_at")
_UNIX_S = (1e9, 1e11)
"""What a column of times must lie between to be Unix seconds; a thousand times that is milliseconds."""
_HEAD_BYTES = 1 << 16
_USUAL_NAMES = ("metrics", "results", "log", "logs", "training_log", "history", "progress")
"""Of files that are called as their folder's run is: then the folder's name says more."""


def sources(folder: Path, files: Sequence[Path]) -> Iterator[Source]:
    for file in files:
        kind = file.suffix.lower()
        if kind in _DELIMITERS:
            head = _names(_line(file, _DELIMITERS[kind]))
        elif kind in _JSON_LINES:
            head = _keys(file)
        else:
            continue
        if _is_run(head):
            yield Source("table", (file,), partial(_read, file, folder))


def _line(file: Path, delimiter: str) -> list[str]:
    text = head_of(file, _HEAD_BYTES).decode("utf-8-sig", "replace")
    try:
        return next(csv.reader(text.splitlines(), delimiter=delimiter), [])
    except csv.Error:
        return []


def _keys(file: Path) -> list[str]:
    """Of the first lines: the very first may be about the run as a whole."""
    lines = head_of(file, _HEAD_BYTES).splitlines()[:20]
    return list(dict.fromkeys(name for line in lines for name, _ in flat(_object(line) or {})))


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _names(head: Sequence[str]) -> list[str]:
    return [name.strip() for name in head]


def _is_run(head: Sequence[str]) -> bool:
    if tuple(head[:5]) == EXPORT_COLUMNS or len(head) < 2:
        return False
    return _step_column(head) is not None or any(loss_kind(name) or is_evaluation_loss(name) for name in head)


def _step_column(names: Iterable[str]) -> str | None:
    by_name = {name.lower(): name for name in reversed(list(names))}
    return next((by_name[one] for one in STEP_COLUMNS if one in by_name), None)


def _read(file: Path, folder: Path) -> Iterator[OldRun]:
    usual = file.stem.lower() in _USUAL_NAMES
    run = OldRun(f"table:{file.resolve()}", folder.resolve().name if usual else file.stem)
    others: Counter[str] = Counter()
    if file.suffix.lower() in _JSON_LINES:
        _read_lines(run, file, others)
    else:
        _read_csv(run, file, others)
    run.left_out = counted(others) + run.left_out
    if run.series:
        yield run


# ---- CSV: by columns, which is quick


def _read_csv(run: OldRun, file: Path, others: Counter[str]) -> None:
    text = file.read_bytes().decode("utf-8-sig", "replace").replace("\0", "")
    end = text.rfind("\n") + 1  # what comes after it may be cut in the middle of a number
    if text[end:].strip():
        run.left_out.append(f"the last {some(len(text[end:].encode()), 'byte')} are no whole row")
    rows = csv.reader(io.StringIO(text[:end], newline=""), delimiter=_DELIMITERS[file.suffix.lower()])
    head = _names(next(rows, []))
    _add_columns(run, head, _columns(rows, len(head), others), others)


def _columns(rows: Iterator[list[str]], width: int, others: Counter[str]) -> list[tuple[str, ...]]:
    kept = []
    try:
        for row in rows:
            if len(row) == width:
                kept.append(row)
            elif row:
                others["rows with another number of cells than the head"] += 1
    except csv.Error:
        others["places at which this is no CSV any more; the rest"] += 1
    return list(zip(*kept, strict=True)) if kept else []


def _add_columns(run: OldRun, head: Sequence[str], columns: list[tuple[str, ...]], others: Counter[str]) -> None:
    if not columns:
        return
    counted = _step_column(head)
    if counted is None:
        run.left_out.append("no column counts the steps: rows are counted")
    steps: Sequence[int | None] = range(1, len(columns[0]) + 1)
    if counted is not None:
        steps = [whole_step(cell) for cell in columns[head.index(counted)]]
    times = _times(head, columns)
    for at, name in enumerate(head):
        if not name or name == counted or at == times[0] or head.index(name) != at:
            continue
        for step, cell, time in zip(steps, columns[at], times[1], strict=True):
            if cell == "" or cell.isspace():
                continue
            value = number(cell)
            if value is None:
                others[f"cells of `{name[:60]}` that are no numbers"] += 1
            elif step is None:
                others["cells in rows without a whole step"] += 1
            else:
                run.add(name, step, value, time)


def _times(head: Sequence[str], columns: list[tuple[str, ...]]) -> tuple[int, Sequence[float]]:
    """(the place of the column that has times of day, the times); (-1, NaN) where none has."""
    for at, name in enumerate(head):
        if name.lower() in _TIMES:
            found = [math.nan if (value := number(cell)) is None else value for cell in columns[at]]
            if per_second := _per_second(found):
                return at, [value / per_second for value in found]
    return -1, [math.nan] * len(columns[0])


def _per_second(values: Sequence[float]) -> float:
    """1 for Unix seconds, 1000 for milliseconds, 0 for what is neither."""
    known = [value for value in values if math.isfinite(value)]
    is_near = (
        each for each in (1.0, 1000.0) if known and all(_UNIX_S[0] <= value / each < _UNIX_S[1] for value in known)
    )
    return next(is_near, 0.0)


# ---- JSON lines


def _read_lines(run: OldRun, file: Path, others: Counter[str]) -> None:
    data = file.read_bytes()
    rows: list[dict[str, Any]] = []
    for line in data.splitlines():
        if line.strip():
            found = _object(line)
            if found is None:
                others["lines that are no whole JSON objects"] += 1
            else:
                rows.append(dict(flat(found)))
    if rows:
        _add_rows(run, rows, others)


def _add_rows(run: OldRun, rows: list[dict[str, Any]], others: Counter[str]) -> None:
    counted = _step_column(dict.fromkeys(name for row in rows for name in row))
    if counted is None:
        run.left_out.append("no field counts the steps: lines are counted")
    clock, per_second = _clock(rows)
    for place, row in enumerate(rows, 1):
        step = place if counted is None else whole_step(row.get(counted))
        if step is None:
            others["lines without a whole step"] += 1
            continue
        time = number(row.get(clock))
        values = ((name, value) for name, value in row.items() if name not in (counted, clock))
        add_row(run, step, values, others, math.nan if time is None else time / per_second)


def _clock(rows: list[dict[str, Any]]) -> tuple[str, float]:
    """The field that has times of day, and how many of them are a second."""
    for name in _TIMES:
        values = [value for row in rows if (value := number(row.get(name))) is not None]
        per_second = _per_second(values)
        if per_second:
            return name, per_second
    return "", math.nan
