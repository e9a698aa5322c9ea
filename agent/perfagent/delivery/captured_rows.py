"""Rows of the script's other loggers get their names: each keeps its own unless the agent delivers that series in this
run.

Then it becomes `logged/NAME`, which no rule reads. What the agent delivers is known here: from the rows of
`perfagent.log` and of the samplers, and from the steps that were read. A catalogue name waits until two steps have
shown whether the agent sends that series itself. So does a row whose step lies ahead of the run's, until the server has
seen that this process counts steps of its own: it would take the logger's step for the run's. All others are written at
once. A value that two loggers were given under one name for one step counts once.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from perfagent.delivery.columns import Columns, clean_name, number
from perfagent.delivery.row_packing import Packed, Packer
from perfagent.wire import CATALOGUE, FAMILIES, LOGGED

if TYPE_CHECKING:
    from perfagent.delivery.handoff import Handoff
    from perfagent.step.pending_logs import CapturedLog

__all__ = ["EARLY_S", "CapturedRows"]

DEFERRED_S = 60.0
"""How long a value may take from its device, and the first step of an optimizer after a backward pass."""
EARLY_S = 5.0
"""How long a training may take to begin after a call, until it is taken for a process that trains nothing."""
_DECISIVE_STEPS = 2
"""The first step of a process has no time, and what is counted per second none either."""
_MAY_LACK = frozenset(
    name for name in CATALOGUE
    if name in ("loss", "lr", "step_time_s", "samples_per_s", "tokens_per_s", "grad/norm") or name.startswith("phase/")
)  # fmt: skip
"""What the first steps say; other series of steps come later, and are the agent's in any training."""
_STEP_MARKS = frozenset(("step_time_s", "phase/optimizer_s"))
"""Series by which the server knows that the process counts steps itself (the server's store/appending.py)."""
_SAMPLED = ("agent/", "cuda/", "disk/", "gpu/", "host/", "memory/", "node_gpu", "process/")
_Row = tuple[int, float, float, dict[str, float]]


class CapturedRows:
    """The rows of other loggers on their way to the tick that can name them."""

    def __init__(self, handoff: Handoff, columns: Columns) -> None:
        self._handoff, self._columns = handoff, columns
        self._packer = Packer(columns)
        self.delivered: set[str] = set()
        """Names of the series that steps, samplers and `perfagent.log` have had so far."""
        self._names: dict[str, str] = {}
        """Name -> that under which it is written, as far as that follows from `_series` series of the agent."""
        self._series = 0
        self.arriving: list[CapturedLog] = []
        self._undecided: list[_Row] = []
        self._written: dict[str, tuple[int, float | None]] = {}
        """Name -> step and value that were written last."""

    @property
    def waits(self) -> bool:
        return bool(self.arriving or self._undecided)

    def take(self, *, last: bool) -> list[Packed]:
        """What can be written down. last: nothing is waited for."""
        now, p = time.monotonic(), self._handoff.progress
        waiting, self._undecided = [*self._undecided, *self._arrived(now, last=last)], []
        if len(self.delivered) != self._series or len(self._names) > 2 * self._columns.max_series:
            self._series = len(self.delivered)
            self._names.clear()
        for step, wall, monotonic, metrics in waiting:
            age_s = now - monotonic
            ahead = self._runs_ahead(step, age_s, last=last)
            named: dict[str, float] = {}
            later: dict[str, float] = {}
            for name, value in metrics.items():
                written_name = None if ahead else self._names.get(name) or self._name(name, age_s, last=last)
                if written_name is None:
                    later[name] = value
                    continue
                self._names[name] = written_name
                if self._is_new(written_name, step, value):
                    named[written_name] = value
            if later:
                self._undecided.append((step, wall, monotonic, later))
            if named:
                if p is not None and p.last is None and step > p.logs.captured_step:
                    p.logs.captured_step = step
                self._packer.add(step, wall, monotonic, (*named,), named.values())
        return self._packer.take()

    def _arrived(self, now: float, *, last: bool) -> Iterable[_Row]:
        logs, self.arriving = self.arriving, []
        for log in logs:
            with contextlib.suppress(RuntimeError):  # of a device that was lost
                if log.ready():
                    step, wall, monotonic, metrics = log.row()
                    yield step, wall, monotonic, _numbers(metrics.items())
                    continue
                if log.age_s(now) < DEFERRED_S and not last:
                    self.arriving.append(log)
                    continue
            self._handoff.counters["dropped"] += 1

    def _name(self, name: str, age_s: float, *, last: bool) -> str | None:
        """The name under which it is written; None while that is not known."""
        reader, p = self._handoff.reader, self._handoff.progress
        if name in self.delivered or name.startswith(_SAMPLED):
            return LOGGED + name
        if name not in CATALOGUE and name.partition("/")[0] + "/" not in FAMILIES:
            return name
        if p is None or p.last is None:
            return name if last or not self._may_step(age_s) else None
        if name not in _MAY_LACK:
            return LOGGED + name
        return name if last or reader.steps >= _DECISIVE_STEPS else None

    def _runs_ahead(self, step: int, age_s: float, *, last: bool) -> bool:
        """Whether the server would take this step for the run's, which it may not be."""
        p = self._handoff.progress
        if p is None or last or step <= p.in_progress() + 1 or not _STEP_MARKS.isdisjoint(self.delivered):
            return False
        return age_s < DEFERRED_S if p.last is not None else self._may_step(age_s)

    def _may_step(self, age_s: float) -> bool:
        """Whether an optimizer may soon make the first step of this process."""
        p = self._handoff.progress
        if p is None or p.logs.by_log or "torch" not in sys.modules:
            return False
        return age_s < (DEFERRED_S if p.losses.seen_backward else EARLY_S)

    def _is_new(self, name: str, step: int, value: float) -> bool:
        written = step, None if value != value else value  # one NaN is like another
        if self._written.get(name) == written:
            return False
        if name in self._written or len(self._written) < self._columns.max_series:
            self._written[name] = written
        return True


def _numbers(metrics: Iterable[tuple[object, object]]) -> dict[str, float]:
    """What can be stored, under names that can be; all else is no scalar of ours to count."""
    found = ((clean_name(key), value if type(value) is float else number(value)) for key, value in metrics)
    return {name: value for name, value in found if name is not None and value is not None}
