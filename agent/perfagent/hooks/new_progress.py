"""Creates the state of a step in progress, with the parts that hooks, signals and decoding keep in it."""

from __future__ import annotations

from collections import deque
from typing import Any

from perfagent.decode.step_decoder import StepReader
from perfagent.governor import Governor
from perfagent.hooks.multi_optimizer import Together
from perfagent.signals.gradient_schedule import Health
from perfagent.step.state import Progress

__all__ = ["new_progress"]


def new_progress(rows: deque[Any], governor: Governor, *, start_step: int = 0) -> Progress:
    """rows: the deque that the sender empties. start_step: how many steps were completed before."""
    return Progress(rows, governor, reader=StepReader(), health=Health(), together=Together(), start_step=start_step)
