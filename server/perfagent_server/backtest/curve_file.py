"""CSV files as runs: a row a step, or what `perfagent export RUN --format csv` writes.

A row a step has the column `step` and any of loss, lr, grad_norm, loss_scale, train_time_ms (cumulative), step_time_s
and the catalogue's names; losses by other names (`val_loss`, `g_loss`) are read, too. An empty cell is absent; nan and
inf are values. The clock: a step takes what step_time_s says, else train_time_ms; without either a row takes a second.
Where the steps begin again at a lower one, the run was started again there.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfagent.command_line.parser import closest
from perfagent.errors import ConfigError, ResourceError
from perfagent.wire import CATALOGUE, Event, is_evaluation_loss, loss_kind
from perfagent.wire.metrics import FAMILIES
from perfagent_server.backtest.exported import EXPORT_COLUMNS, Exported
from perfagent_server.backtest.moment import Moment

__all__ = ["EPOCH", "read_curve_file"]

EPOCH = 1_700_000_000.0
"""When a run begins whose file knows no time of day, Unix seconds."""
_SHORT = {"grad_norm": "grad/norm", "loss_scale": "amp/scale"}
_TIMER = "train_time_ms"
_STEP_TIME = "step_time_s"
_UNTIMED_ROW_S = 1.0
_ALLOWED = "loss, lr, grad_norm, loss_scale, train_time_ms, step_time_s and the catalogue's names, as `phase/data_s`"


def read_curve_file(path: Path) -> Iterator[Moment]:
    """Raises ConfigError, with the line, for what is no such file, and ResourceError for one that cannot be read."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file)
            head = [name.strip() for name in next(rows, [])]
            if tuple(head) == EXPORT_COLUMNS:
                yield from _exported(path, rows)
            else:
                yield from _Curve(path, head).moments(rows)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is no CSV file: {error}") from error
    except OSError as error:
        raise ResourceError(f"{path} cannot be read ({error.strerror or error})") from error


def _exported(path: Path, rows: Iterator[list[str]]) -> Iterator[Moment]:
    samples = Exported()
    for line, row in enumerate(rows, 2):
        if len(row) != len(EXPORT_COLUMNS):
            raise ConfigError(f"{path}, line {line}: {len(row)} cells for {len(EXPORT_COLUMNS)} columns")
        name, rank, step, time, value = row
        try:
            samples.add(name.removeprefix("'"), int(rank), int(step), float(time), float(value))
        except ValueError as error:
            raise ConfigError(f"{path}, line {line}: {error}") from error
    yield from samples.moments([])


@dataclass(slots=True)
class _Clock:
    """When each step was. elapsed: since the run began, seconds; timer: (step, milliseconds) as last told; usual: how
    long a step took last, None while that is not known; apart: steps between the last two rows."""

    elapsed: float = 0.0
    timer: tuple[int, float] | None = None
    usual: float | None = None
    step: int | None = None
    apart: int | None = None

    def took(self, step: int, row: Mapping[str, float]) -> float | None:
        """How long a step took by the row itself; None where it does not say."""
        before, timer = self.timer, row.get(_TIMER, math.nan)
        if math.isfinite(timer):
            self.timer = step, timer
        if _STEP_TIME in row:
            return row[_STEP_TIME]
        if before is None or step <= before[0] or not timer >= before[1]:
            return None  # scripts set their timer back after the first steps
        return (timer - before[1]) / 1000 / (step - before[0])

    def advance(self, step: int, took: float | None) -> float:
        """The time of the row. Where only every tenth step is in the file, ten steps pass from row to row; but steps
        that are missing in one place take no time, or they would look as if the run had stood still."""
        if took is not None and 0 < took < math.inf:
            self.usual = took
        if self.step is not None and step != self.step:
            apart = max(1, step - self.step)
            passed = min(apart, self.apart or apart)
            self.elapsed += _UNTIMED_ROW_S if self.usual is None else self.usual * passed
            self.apart = apart
        self.step = step
        return EPOCH + self.elapsed


class _Curve:
    """A file with a row a step. Raises ConfigError for a head that is none."""

    def __init__(self, path: Path, head: Sequence[str]) -> None:
        self._path, self._head = path, head
        if "step" not in head:
            raise ConfigError(
                f"{path} has no column `step`; it has {', '.join(head)[:200] or 'none'}, and allowed are step, {_ALLOWED}"
            )
        for name in head:
            if head.count(name) > 1:
                raise ConfigError(f"{path} has two columns {name!r}")
            if name != "step" and not _is_known(name):
                raise ConfigError(
                    f"{path} has a column {name[:80]!r} that no rule reads{_meant(name)}; allowed are {_ALLOWED}"
                )
        if len(head) < 2:
            raise ConfigError(f"{path} has no column but `step`; allowed are {_ALLOWED}")

    def moments(self, rows: Iterator[list[str]]) -> Iterator[Moment]:
        clock, attempt, line = _Clock(), 0, 1
        for line, cells in enumerate(rows, 2):
            if not any(cell.strip() for cell in cells):
                continue
            row = self._numbers(line, cells)
            step = self._step(line, row)
            begins = clock.step is None or step < clock.step
            if begins and attempt:
                clock.timer = None
            took = clock.took(step, row)
            time = clock.advance(step, took)
            events: tuple[Event, ...] = ()
            if begins:
                attempt += 1
                events = (_started(time, step if step > 1 else 0),)
            values = {_SHORT.get(name, name): value for name, value in row.items() if name not in ("step", _TIMER)}
            if took is not None:
                values[_STEP_TIME] = took
            yield Moment(time, step, values, events, attempt=attempt)
        if not attempt:
            raise ConfigError(f"{self._path} has no row below its head")

    def _numbers(self, line: int, cells: Sequence[str]) -> dict[str, float]:
        if len(cells) > len(self._head):
            raise ConfigError(f"{self._path}, line {line}: {len(cells)} cells for {len(self._head)} columns")
        found = {}
        for name, cell in zip(self._head, cells, strict=False):
            if not cell.strip():
                continue
            try:
                found[name] = float(cell)
            except ValueError:
                raise ConfigError(
                    f"{self._path}, line {line}: {name} is {cell[:40]!r}, not a number; leave a cell empty where there is "
                    "no value"
                ) from None
        return found

    def _step(self, line: int, row: Mapping[str, float]) -> int:
        step = row.get("step")
        if step is None:
            raise ConfigError(f"{self._path}, line {line}: there is no step")
        if not (0 <= step < 2**53 and step == int(step)):
            raise ConfigError(f"{self._path}, line {line}: step is {step:g}, not a whole number from 0 on")
        return int(step)


def _started(time: float, start_step: int) -> Event:
    return Event(kind="state", time=time, data={"state": "running", "world_size": 1, "start_step": start_step})


def _is_known(name: str) -> bool:
    group, slash, rest = name.partition("/")
    return (
        name in CATALOGUE
        or name in _SHORT
        or name == _TIMER
        or bool(slash and rest and (group + slash in FAMILIES or (group == "phase" and name.endswith("_s"))))
        or bool(loss_kind(name))
        or is_evaluation_loss(name)
    )


def _meant(name: str) -> str:
    meant = closest(name, ["step", _TIMER, *_SHORT, *CATALOGUE])
    return f" (did you mean {meant}?)" if meant else ""
