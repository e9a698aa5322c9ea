"""Reads what only some steps have measured besides their gradients: dead units, the device time of a pass, and what was bad
while a loss was on its way."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from perfagent.device import value_of
from perfagent.step.gradients import DeadShares, Deferred, PassTime, Witnessed

if TYPE_CHECKING:
    from perfagent.step.state import StepState
    from perfagent.wire.evidence import BatchTensor

__all__ = ["add_deferred"]


def add_deferred(p: StepState, when: tuple[int, float, float], values: dict[str, float], found: Deferred) -> None:
    """Adds series to a step, and rows where there are many names. Called once, when ready. when: step, Unix time and
    monotonic time."""
    if isinstance(found, DeadShares):
        _add_dead(p, when, values, found)
    elif isinstance(found, PassTime):
        _add_pass(p, found)
    else:
        _add_witnessed(p, when[0], found)


def _add_dead(p: StepState, when: tuple[int, float, float], values: dict[str, float], found: DeadShares) -> None:
    shares = [pair for reading, names in found.readings for pair in zip(names, reading.values(), strict=True)]
    values["dead/share"] = sum(share for _, share in shares) / len(shares)
    p.rows.append((*when, {f"dead_share/{name}": share for name, share in shares}))


def _add_pass(p: StepState, found: PassTime) -> None:
    """For a large model a pass takes longer on the device than on the thread that launches it. The step waits for the
    slower one."""
    if p.clock is not None:
        seconds = p.clock.seconds(found.begin, found.end) or 0.0
        p.measured.beyond_ns = max(0.0, seconds * 1e9 - found.cost_ns)
        p.costs.device_ns += p.measured.beyond_ns
        p.clock.release([found.begin, found.end])


def _add_witnessed(p: StepState, step: int, found: Witnessed) -> None:
    largest = found.largest.values() if found.largest is not None else []
    bad = [name for name, value in zip(found.names, largest, strict=False) if not math.isfinite(value)]
    highest = [(shown, 0.0 if reading is None else value_of(reading)) for shown, reading in found.inputs]
    inputs: list[BatchTensor] = [{**shown, "max": high} for shown, high in highest if not high < math.inf]
    p.links.investigator.witnessed(step, bad, found.names, inputs)
