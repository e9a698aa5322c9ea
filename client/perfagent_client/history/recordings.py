"""Reads perfagent's own files: offline recordings (perfagent.delivery.recording), and exports as CSV, JSON lines or Parquet.

Only these files have ranks and events; `OldRun.processes` holds them.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfagent.wire import Group
from perfagent.wire.quantities import some
from perfagent_client.history.left_out import counted
from perfagent_client.history.old_run import OldRun, Process, Samples, Source
from perfagent_client.history.parquet_file import batches, columns
from perfagent_client.history.rows import head_of, number, whole_step

if TYPE_CHECKING:
    from perfagent.delivery.recording import Recorded

__all__ = ["EXPORT_COLUMNS", "sources"]

EXPORT_COLUMNS = ("name", "rank", "step", "time", "value")


def sources(folder: Path, files: Sequence[Path]) -> Iterator[Source]:
    recorded = _recorded_folders(folder)
    if recorded:
        yield Source(
            "recording", (*recorded, *files) if recorded == [folder] else tuple(recorded), partial(_recording, folder)
        )
    for file in files if recorded != [folder] else ():
        samples = {".csv": _csv, ".jsonl": _json_lines, ".parquet": _parquet}.get(file.suffix.lower())
        if samples is not None and _is_export(file):
            yield Source("export", (file,), partial(_export, file, samples))


# ---- recordings


def _recorded_folders(folder: Path) -> list[Path]:
    """None on a system that cannot record: its files are locked as POSIX has it."""
    try:
        from perfagent.delivery.recording import recorded_folders
    except ImportError:
        return []
    return recorded_folders(folder)


def _recording(folder: Path) -> Iterator[OldRun]:
    from perfagent.delivery.recording import read_recording

    runs: dict[str, list[Recorded]] = {}
    for one in read_recording(folder):
        runs.setdefault(one.run, []).append(one)
    for run, found in runs.items():
        old = OldRun(f"perfagent:{run}", next((one.name for one in found if one.name), None) or run, found[0].project)
        old.processes = [Process(one.attempt, one.rank, one.groups, one.events) for one in found]
        damaged = sum(one.damaged for one in found)
        if damaged:
            old.left_out.append(f"{some(damaged, 'file')} damaged; what is whole in it was read")
        lowest = min(one.rank for one in found)
        for group in (group for one in found if one.rank == lowest for group in one.groups):
            for name in group.values:
                samples = old.series.setdefault(name, Samples())
                samples.step.extend(group.steps())
                samples.time.extend(group.times())
                samples.value.extend(iter(group.column(name)))  # a column may be float32
        yield old


# ---- what `perfagent export` wrote


def _is_export(file: Path) -> bool:
    head = head_of(file, 4096)
    if file.suffix.lower() == ".parquet":
        return columns(file) >= set(EXPORT_COLUMNS)
    first = head.split(b"\n", 1)[0].strip()
    if file.suffix.lower() == ".csv":
        return first.decode("utf-8-sig", "replace") == ",".join(EXPORT_COLUMNS)
    try:
        return tuple(json.loads(first)) == EXPORT_COLUMNS
    except (ValueError, TypeError, RecursionError):
        return False


_Row = tuple[str, int, int, float, float]


def _export(file: Path, samples: Callable[[Path, OldRun], Iterable[_Row]]) -> Iterator[OldRun]:
    run = OldRun(f"perfagent-export:{file.resolve()}", file.stem)
    ranks: dict[int, dict[str, Samples]] = {}
    for name, rank, step, time, value in samples(file, run):
        ranks.setdefault(rank, {}).setdefault(name, Samples()).add(step, value, time)
    run.processes = [Process(1, rank, list(_groups(series))) for rank, series in sorted(ranks.items())]
    run.series = ranks[min(ranks)] if ranks else {}
    yield run


def _groups(series: dict[str, Samples]) -> Iterator[Group]:
    """Series that share their steps and times are one group."""
    alike: dict[tuple[bytes, bytes], dict[str, bytes]] = {}
    for name, one in series.items():
        alike.setdefault((one.step.tobytes(), one.time.tobytes()), {})[name] = one.value.tobytes()
    for (step, time), values in alike.items():
        yield Group(step, time, time, values)


def _csv(file: Path, run: OldRun) -> Iterator[_Row]:
    """A name that begins like a formula has an apostrophe before it, for spreadsheets."""
    text = file.read_bytes().decode("utf-8-sig", "replace").replace("\0", "")
    whole = text[: text.rfind("\n") + 1]
    _say_cut(run, text[len(whole) :])
    rows = (
        (row[0].removeprefix("'"), *row[1:])
        for row in csv.reader(whole.splitlines()[1:])
        if len(row) == len(EXPORT_COLUMNS)
    )
    yield from _checked(rows, run)


def _json_lines(file: Path, run: OldRun) -> Iterator[_Row]:
    def rows() -> Iterator[tuple[Any, ...]]:
        for line in file.read_bytes().splitlines():
            try:
                one = json.loads(line)
                yield tuple(one[name] for name in EXPORT_COLUMNS)
            except (ValueError, TypeError, KeyError, RecursionError):
                yield ()

    yield from _checked(rows(), run)


def _parquet(file: Path, run: OldRun) -> Iterator[_Row]:
    for batch in batches(file, run.left_out, EXPORT_COLUMNS):
        yield from _checked(zip(*(batch[name] for name in EXPORT_COLUMNS), strict=True), run)


def _checked(rows: Iterable[Sequence[Any]], run: OldRun) -> Iterator[_Row]:
    others: Counter[str] = Counter()
    for row in rows:
        name, rank, step, time, value = row or (None,) * len(EXPORT_COLUMNS)
        whole, of, at, found = whole_step(step), whole_step(rank), number(time), number(value)
        if not isinstance(name, str) or whole is None or of is None or at is None or found is None:
            others["rows that are no samples"] += 1
        else:
            yield name, of, whole, at, found
    run.left_out += counted(others)


def _say_cut(run: OldRun, rest: str) -> None:
    if rest:
        run.left_out.append(f"the last {some(len(rest.encode()), 'byte')} are no whole row")
