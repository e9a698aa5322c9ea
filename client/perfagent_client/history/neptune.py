"""Reads the Parquet files of neptune-exporter (https://github.com/neptune-ai/neptune-exporter). A run has one file or several.

Neptune's steps are decimal numbers. Whole steps stay as they are. If steps of a run have fractions, the steps of those series
are multiplied by one power of ten that makes them whole, like the exporter's --step-multiplier.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from perfagent_client.history.left_out import not_numbers
from perfagent_client.history.old_run import OldRun, Samples, Source
from perfagent_client.history.parquet_file import batches, columns

__all__ = ["sources"]

_PART = re.compile(r"(.*-[0-9a-f]{16})?_?part_(\d+)\.parquet")
"""RUN-DIGEST_part_N.parquet; of the first exporters part_N.parquet."""
_ABOUT = ("project_id", "run_id", "attribute_path", "attribute_type", "step", "timestamp")
_VALUES = {kind: f"{kind}_value" for kind in ("int", "float", "string", "bool", "datetime", "string_set")}
_KINDS = {"string_series": "text", "histogram_series": "histogram"}
_CONSOLE_LINES = 1000
_MILLION = 1_000_000


@dataclass(slots=True)
class _Found:
    """Of one run. series: their steps in millionths. console: time in ms, line."""

    project: str
    series: defaultdict[str, Samples] = field(default_factory=lambda: defaultdict(Samples))
    attributes: dict[str, Any] = field(default_factory=dict)
    console: list[tuple[int, str]] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)


def sources(folder: Path, files: Sequence[Path]) -> Iterator[Source]:  # noqa: ARG001 - as all readers
    """The parts of one run are one source; parts of the first exporters hold several runs."""
    groups: defaultdict[str, list[tuple[int, Path]]] = defaultdict(list)
    for file in files:
        if part := _PART.fullmatch(file.name):
            words = columns(file)
            if "attribute_path" in words or (part[1] and not words):
                groups[part[1] or ""].append((int(part[2]), file))
    for parts in groups.values():
        paths = tuple(file for _, file in sorted(parts))
        yield Source("neptune", paths, partial(_from_parts, paths))


def _from_parts(paths: Sequence[Path]) -> Iterator[OldRun]:
    found: dict[tuple[str, str], _Found] = {}
    left_out: list[str] = []
    for path in paths:
        for batch in batches(path, left_out, [*_ABOUT, *_VALUES.values()]):
            try:
                _read(batch, found)
            except (TypeError, ValueError, OverflowError, OSError):
                left_out.append(f"the rest of {path.name} is damaged")
                break
    if not found:
        yield OldRun(f"neptune:{paths[0]}", paths[0].stem, left_out=left_out)
    for (project, run_id), one in found.items():
        run = _run(project, run_id, one)
        run.left_out += left_out
        left_out = []
        yield run


def _read(batch: dict[str, list[Any]], found: dict[tuple[str, str], _Found]) -> None:
    about = zip(*(batch[name] for name in _ABOUT), strict=True)
    floats = batch["float_value"]
    for row, (project, run_id, path, kind, step, time) in enumerate(about):
        key = (str(project), str(run_id))
        one = found.get(key) or found.setdefault(key, _Found(project))
        if kind == "float_series":
            value = floats[row]
            if step is None or step < 0 or (value is None and time is None):
                one.others["value without a step"] += 1
            else:  # the exporter writes NaN as nothing
                value = math.nan if value is None else value
                one.series[str(path)].add(step, value, math.nan if time is None else time / 1000)
        elif kind in _VALUES:
            if (value := batch[_VALUES[kind]][row]) is not None:
                one.attributes[str(path)] = value if kind != "datetime" else datetime.fromtimestamp(value / 1000, UTC)
        elif kind == "string_series" and str(path).rpartition("/")[2] in ("stdout", "stderr"):
            one.console.append((time or 0, batch["string_value"][row] or ""))
        else:
            one.others[_KINDS.get(kind, "file")] += 1


def _run(project: str, run_id: str, found: _Found) -> OldRun:
    of = found.attributes.get
    experiment = of("sys/experiment/name")  # Neptune 3; its sys/name is the experiment's, too
    tags = [*(of("sys/tags") or ()), *(of("sys/group_tags") or ())]
    run = OldRun(
        source=f"neptune:{project}/{run_id}",
        name=str((of("sys/custom_run_id") if experiment else of("sys/name")) or run_id),
        project=project,
        group=str(experiment or min(of("sys/group_tags") or [""])),
        tags=list(dict.fromkeys(tags)),
        notes=str(of("sys/description") or ""),
        config={
            path: value.isoformat() if isinstance(value, datetime) else value
            for path, value in found.attributes.items()
            if not path.startswith("sys/")
        },
        console=[line for _, line in sorted(found.console, key=lambda one: one[0])[-_CONSOLE_LINES:]],
        series=dict(found.series),
        left_out=not_numbers(found.others),
    )
    if owner := of("sys/owner"):
        run.meta["user"] = owner
    if (failed := of("sys/failed")) is not None:
        run.state = "failed" if failed else "finished"
    times = (of("sys/creation_time"), of("sys/ping_time"))
    run.started, run.ended = (time.timestamp() if isinstance(time, datetime) else None for time in times)
    if parent := of("sys/forking/parent"):
        run.meta["forked_from"] = {"run": parent, "step": of("sys/forking/step")}
        run.left_out.append(
            f"the steps up to {of('sys/forking/step')}: they are those of {parent}, of which this is a fork"
        )
    _make_steps_whole(run)
    return run


def _make_steps_whole(run: OldRun) -> None:
    fractional = {path for path, samples in run.series.items() if any(step % _MILLION for step in samples.step)}
    unit = _MILLION
    while any(step % unit for path in fractional for step in run.series[path].step):
        unit //= 10
    for path, samples in run.series.items():
        by = unit if path in fractional else _MILLION
        samples.step = array("q", (step // by for step in samples.step))
    if fractional:
        run.meta["steps_multiplied_by"] = _MILLION // unit
        names = ", ".join(sorted(fractional)[:5]) + (" ..." if len(fractional) > 5 else "")
        run.left_out.append(f"fractions of steps: those of {names} are multiplied by {_MILLION // unit:,}")
