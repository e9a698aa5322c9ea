"""The state of a step in progress, as a run makes it, for tests of its parts."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from perfagent.causes.investigator import Investigator
from perfagent.hooks.selection.joint_step import JointStep
from perfagent.hooks.selection.optimizers import OptimizerSelection
from perfagent.measure.gradient_schedule import GradientSchedule
from perfagent.step.clusters import LoopFacts
from perfagent.step.governor import Governor
from perfagent.step.roles import RunLinks
from perfagent.step.state import StepState

__all__ = ["new_progress"]


def new_progress(rows: deque[Any]) -> StepState:
    links = RunLinks(Governor(0.5), LoopFacts())
    progress = StepState(rows, links)
    links.gradient_schedule = schedule = GradientSchedule(progress)
    progress.selection, links.joint_step = OptimizerSelection(progress), JointStep(progress, schedule)
    links.investigator = Investigator(progress, SimpleNamespace(rows=rows), lambda: None)  # type: ignore[arg-type]
    return progress
