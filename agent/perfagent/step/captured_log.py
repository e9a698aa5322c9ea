"""What a script logs by another logger, as a row on its way to the sender: which step it belongs to.

The step that the call names is taken as it is, in whatever unit the script counts. Without one it is the step in
progress. Where no optimizer steps, the logger's own count says which step it is. None of this moves the run's own step.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from perfagent.step.pending_logs import EarlyLog

if TYPE_CHECKING:
    from perfagent.step.state import StepState

__all__ = ["CapturedLog", "capture"]

_MOST_WAITING = 1000


class CapturedLog(EarlyLog):
    """own_step: the logger's own count, for a process in which no optimizer steps; None where the logger has none."""

    __slots__ = ("own_step",)

    def __init__(self, metrics: dict[str, Any], own_step: int | None) -> None:
        # as EarlyLog does, a call less
        self._time, self._monotonic, self._metrics, self._step = time.time(), time.monotonic(), metrics, None
        self.goes_on = True  # so that none of these counts as a step of log()
        self.own_step = own_step

    @property
    def size(self) -> int:
        return len(self._metrics)

    def settle_without_optimizer(self, step: int) -> None:
        self.settle(step if self.own_step is None else self.own_step)


def capture(p: StepState, metrics: dict[str, Any], step: int | None, own_step: int | None) -> None:
    """One append. step: what the call names; None where it names none."""
    log = CapturedLog(metrics, own_step)
    if step is not None:
        log._step = step
    elif p.last is not None or p.logs.by_log is False:
        log.settle(p.in_progress())
    elif p.logs.by_log or "torch" not in sys.modules:  # nothing here will step an optimizer soon
        log.settle_without_optimizer(p.logged_at())
    else:
        if p.losses.seen_backward:
            # as log() asks: whoever waits for an optimizer's first step learns in the end that there is none
            p.unstepped()
        if len(p.early) >= _MOST_WAITING:
            p.settle_early(None)
        p.early.append(log)
    p.rows.append(log)
