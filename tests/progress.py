"""The state of a step in progress, as a run makes it, for tests of its parts."""

from __future__ import annotations

from collections import deque
from typing import Any

from perfagent.decode.step_decoder import StepReader
from perfagent.hooks.multi_optimizer import Together
from perfagent.signals.gradient_report import GradientReport
from perfagent.signals.gradient_schedule import Health
from perfagent.step.clusters import RunLinks
from perfagent.step.governor import Governor
from perfagent.step.state import StepState

__all__ = ["new_progress"]


def new_progress(rows: deque[Any]) -> StepState:
    reader, schedule = StepReader(), Health()
    links = RunLinks(Governor(0.5), reader, reader.account, schedule, GradientReport(schedule), Together())
    return StepState(rows, links)
