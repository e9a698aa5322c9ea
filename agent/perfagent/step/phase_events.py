"""Reports a part of the loop as an event, so that it is shown although not every step has it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfagent.step.state import StepState

__all__ = ["report_phase"]

_EVENT_EVERY_S = 1.0
_LONG_S = 0.1


def report_phase(
    p: StepState, name: str, begin_step: int, duration_s: float, step: int, *, always: bool = True
) -> None:
    """Sends the event of a phase. always: False for phases that may be short and in every step; one event a
    second is then enough."""
    if p.links.on_event is None:
        return
    if not always and duration_s < _LONG_S:
        at = time.monotonic()
        told = p.phases.told_phases.get(name)
        if told is not None and at - told[0] < _EVENT_EVERY_S and step - told[1] <= 1:
            p.phases.told_phases[name] = told[0], step
            return
        p.phases.told_phases[name] = at, step
    p.links.on_event("phase", {"name": name, "begin_step": begin_step, "duration_s": duration_s}, step=step)
