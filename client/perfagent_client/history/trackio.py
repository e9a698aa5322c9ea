"""Reads trackio projects: the SQLite file, or the Parquet files made from it (trackio/sqlite_storage.py).

The tables of versions 0.1 to 0.43 are read, with or without run ids, with JSON as text or as bytes. Older versions wrote an
empty cell to Parquet in place of NaN. System metrics have no step, so they are numbered.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from perfagent_client.history.left_out import not_numbers
from perfagent_client.history.old_run import OldRun, Source
from perfagent_client.history.parquet_file import batches, columns
from perfagent_client.history.rows import flat
from perfagent_client.history.sqlite_file import rows, runs_of, tables, with_logs

__all__ = ["sources"]

_Record = Mapping[str, Any]
_Table = Callable[[str], Iterator[_Record]]
"""A table's name: its rows, with what was logged in `metrics` or `config`."""
_ENDS = {"metrics": ".parquet", "system_metrics": "_system.parquet", "configs": "_configs.parquet"}
_OWN = ("id", "timestamp", "run_id", "run_name", "project_name", "step", "created_at", "log_id", "space_id")
_TOO_LARGE = 1 << 1023  # for a float
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def sources(folder: Path, files: Sequence[Path]) -> Iterator[Source]:  # noqa: ARG001 - as all readers
    """Files with trackio's tables, each with the Parquet files that were made of it."""
    claimed: set[Path] = set()
    for file in files:  # sorted: a database comes before what was made of it
        read: Callable[[], Iterator[OldRun]] | None = None
        if file in claimed:
            continue
        if "run_name" in tables(file).get("metrics", ""):
            read = partial(runs_of, file, "trackio", partial(_from_database, file.stem))
        elif file.suffix == ".parquet" and {"run_name", "timestamp", "step"} <= columns(file):
            read = partial(_from_parquet, file)
        if read:
            made = (one for end in _ENDS.values() if (one := file.with_name(file.stem + end)) in files)
            paths = tuple(dict.fromkeys((*with_logs(file, files), *made)))
            claimed.update(paths)
            yield Source("trackio", paths, read)


def _from_database(project: str, database: sqlite3.Connection, left_out: list[str]) -> Iterator[OldRun]:
    def table(name: str) -> Iterator[_Record]:
        known = [str(column) for _, column, *_ in rows(database, f"PRAGMA table_info({name})", left_out)]
        statement = f"SELECT * FROM {name} ORDER BY rowid"  # noqa: S608 - one of our own names
        return (dict(zip(known, row, strict=True)) for row in (rows(database, statement, left_out) if known else ()))

    return _runs(project, table, left_out)


def _from_parquet(file: Path) -> Iterator[OldRun]:
    left_out: list[str] = []

    def table(name: str) -> Iterator[_Record]:
        path = file.with_name(file.stem + _ENDS.get(name, ".none"))
        for batch in batches(path, left_out) if path.exists() else ():
            for cells in zip(*batch.values(), strict=True):
                row = dict(zip(batch, cells, strict=True))
                yield {key: row.pop(key) for key in _OWN if key in row} | {"metrics": row, "config": row}

    return _runs(file.stem, table, left_out)


def _runs(project: str, table: _Table, left_out: list[str]) -> Iterator[OldRun]:
    """left_out: of the whole project; its first run says it."""
    runs: dict[str, OldRun] = {}
    others: dict[str, Counter[str]] = {}
    for name in ("metrics", "system_metrics"):
        for record in table(name):
            key = _key(record)
            if key not in runs:
                runs[key], others[key] = _begun(project, record), Counter()
            _take(runs[key], record, others[key])
    for record in table("configs"):
        if run := runs.get(_key(record)):
            _configure(run, record.get("config"))
    for record in table("alerts"):
        if count := others.get(_key(record)):
            count["alert"] += 1
    for key, run in runs.items():
        run.left_out += [*left_out, *not_numbers(others[key])]
        left_out = []
        yield run


def _key(record: _Record) -> str:
    return str(record.get("run_id") or record.get("run_name"))


def _begun(project: str, record: _Record) -> OldRun:
    name, time = str(record.get("run_name")), str(record.get("timestamp"))
    project = str(record.get("project_name") or project)
    run = OldRun(f"trackio:{project}/{_key(record)}", name, project)
    run.started = run.ended = _time(time)
    return run


def _take(run: OldRun, record: _Record, others: Counter[str]) -> None:
    step, time = record.get("step", -1), _time(record.get("timestamp"))
    if time is not None:
        run.ended = max(run.ended or time, time)
    when = math.nan if time is None else time
    for key, value in flat(_decoded(record.get("metrics"))):
        number = _restored(value)
        if value is None:  # where another row of the file has a value
            continue
        if not isinstance(number, float) and (type(number) is not int or abs(number) >= _TOO_LARGE):
            others[_kind(value)] += 1
        elif "step" not in record:
            name = f"system/{key}"
            run.add(name, len(run.series.get(name, ())), number, when)
        elif isinstance(step, int) and 0 <= step < 1 << 63:
            run.add(key, step, number, when)
        else:
            others["value without a step"] += 1


def _restored(value: Any) -> Any:
    return _SPECIAL.get(value, value) if isinstance(value, str) else value


def _kind(value: object) -> str:
    if isinstance(value, dict):  # {"_type": "trackio.image", ...}
        return str(value["_type"]).rpartition(".")[2]
    return {str: "text", bool: "truth value", list: "list"}.get(type(value), "number too large for a float")


def _configure(run: OldRun, config: object) -> None:
    """Keys of trackio's own begin with a low line."""
    found = _decoded(config)
    run.config = {key: _restored(value) for key, value in found.items() if key[:1] != "_" and value is not None}
    run.group = str(found.get("_Group") or "")
    if user := found.get("_Username"):
        run.meta["user"] = user
    if (created := _time(found.get("_Created"))) is not None:
        run.started = created


def _decoded(logged: object) -> dict[str, Any]:
    """JSON, as text or bytes, or what was decoded already."""
    try:
        found = json.loads(logged) if isinstance(logged, str | bytes) else logged
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _time(text: object) -> float | None:
    """Unix seconds. A time without a zone is local to the machine that wrote it; it is read as local to this one."""
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except (ValueError, OverflowError, OSError):
        return None
