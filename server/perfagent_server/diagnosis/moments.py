"""Turns a finished run into the moments that rules judge.

The clock: a step takes what `step_time_s` says, else `train_time_ms` (cumulative); without either a row takes a second. The times
of a file only put its series in order: an evaluation, a pause or a machine that slept is no step, and no file says which it was.
Where the steps begin again at a lower one, the run was started again there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from perfagent.wire import LOSS, Event
from perfagent_client.history.endings import ending
from perfagent_client.history.old_run import OldRun, Samples
from perfagent_client.history.printed import is_progress
from perfagent_client.importing.attempts import Attempts, start_step
from perfagent_server.backtest.moment import Moment
from perfagent_server.backtest.reported import Reported, in_order_of_time
from perfagent_server.diagnosis.names import renamed
from perfagent_server.diagnosis.summed import parts, summed
from perfagent_server.rules.plan import Plan

__all__ = ["EPOCH", "curves", "moments", "parts_of_loss"]

EPOCH = 1_700_000_000.0
"""When a run begins, Unix seconds."""
_TIMER = "train_time_ms"
_STEP_TIME = "step_time_s"
_UNTIMED_ROW_S = 1.0
_Row = tuple[int, int, int]
"""(attempt, step, which of the rows of this step)"""


def curves(run: OldRun) -> dict[str, Samples]:
    """The series by the names that rules read; a loss that has only parts also as their sum."""
    series = _named(run)
    return series | {name: summed([series[one] for one in its]) for name, its in parts(series).items()}


def parts_of_loss(run: OldRun) -> list[str]:
    """The series whose sum `curves` has as the loss; none where a file has a whole one."""
    return parts(_named(run)).get(LOSS, [])


def _named(run: OldRun) -> dict[str, Samples]:
    return {ours: run.series[name] for name, ours in renamed(run.series).items()}


def moments(run: OldRun, plan: Plan) -> Iterator[Moment]:
    """In the order of their times."""
    if run.processes:
        return in_order_of_time([Reported(one.attempt, one.rank, one.groups, one.events) for one in run.processes])
    return _of_rows(run, plan)


def _of_rows(run: OldRun, plan: Plan) -> Iterator[Moment]:
    series = {name: one for name, one in curves(run).items() if len(one) and (name == _TIMER or _is_read(plan, name))}
    rows = _rows(series)
    starts = _starts(rows)
    clock, attempt, time, step = _Clock(), 0, EPOCH, 0
    for (of, step, _), row in sorted(rows.items()):
        if of > attempt:
            clock.timer = None
        took = clock.took(step, row)
        time = clock.advance(step, took)
        events = (_state(time, "running", world_size=1, start_step=starts[of]),) if of > attempt else ()
        attempt = of
        values = {name: value for name, value in row.items() if name != _TIMER}
        if took is not None:
            values[_STEP_TIME] = took
        yield Moment(time, step, values, events, attempt=attempt)
    yield from _end(run, time, step, max(1, attempt))


def _is_read(plan: Plan, name: str) -> bool:
    """Whether any rule reads it. Readings over time are of an agent alone."""
    columns = plan.columns((name,))
    return bool(columns.is_wanted or columns.named_losses or columns.phases or columns.own) and not (
        columns.time and not columns.merged and not columns.own
    )


# ---- rows


def _rows(series: Mapping[str, Samples]) -> dict[_Row, dict[str, float]]:
    """The samples, put together by attempt and step. A second one of a step is a row of its own."""
    rows: dict[_Row, dict[str, float]] = {}
    if not series:
        return rows
    begins = Attempts(series)
    for name, samples in series.items():
        for attempt, step, value in zip(begins.of(samples), samples.step, samples.value, strict=True):
            again = 0
            while name in (row := rows.setdefault((attempt, step, again), {})):
                again += 1
            row[name] = value
    return rows


def _starts(rows: Mapping[_Row, object]) -> dict[int, int]:
    """Attempt -> the step from which it goes on."""
    steps: dict[int, list[int]] = {}
    for attempt, step, _ in rows:
        steps.setdefault(attempt, []).append(step)
    return {attempt: start_step(found) for attempt, found in steps.items()}


# ---- clock, beginning and end


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


def _state(time: float, state: str, **data: object) -> Event:
    return Event(kind="state", time=time, data={"state": state, **data})


def _end(run: OldRun, time: float, step: int, attempt: int) -> Iterator[Moment]:
    """What the console says of it counts before what the tracker noted."""
    how = ending(run.console, is_progress)
    if how is not None:
        said = {"reason": how.reason, "exception": how.exception, "traceback": how.traceback}
        yield Moment(time, step, {}, (_state(time, how.state, **said),), rank=how.rank, attempt=attempt)
    elif run.state in ("finished", "failed"):
        yield Moment(time, step, {}, (_state(time, run.state),), attempt=attempt)
