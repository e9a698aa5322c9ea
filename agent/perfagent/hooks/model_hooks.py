"""Installs and removes the hooks on a run's models and optimizers.

They are in place from the first step on, since torch.compile would trace them before, until the run ends or goes on
with another model.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from perfagent.boundary.guard import guarded
from perfagent.hooks.custom_optimizer import is_foreign
from perfagent.hooks.forward import watch_forward
from perfagent.hooks.optimizer_step import watch_whole_step
from perfagent.hooks.selection.auxiliary_models import AuxiliaryModelFinder
from perfagent.signals.batches.padding import has_embedding
from perfagent.step.state import StepState

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["Watching"]

_MOST_OPTIMIZERS = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 15.0, 600.0


class Watching:
    """The hooks of one run. add: registers a task to call between two steps (rootcause/investigator.py)."""

    def __init__(self, progress: StepState, add: Callable[[Any], None]) -> None:
        self._progress, self._add = progress, add
        self._undo_forward: Callable[[], None] | None = None
        self._finder: AuxiliaryModelFinder | None = None
        self._undo_steps: dict[int, tuple[weakref.ref[Any], Callable[[], None]]] = {}
        self._pause_s, self._due = _FIRST_PAUSE_S, 0.0

    def put_on(self, model: nn.Module | None, optimizer: Optimizer | None) -> None:
        """Watches the model and the optimizer; either may be None (not known yet). Hooks already in place stay."""
        if model is not None and self._undo_forward is None:
            self._progress.links.facts.embedded = has_embedding(model)
            watched = watch_forward(model)
            if watched is not None:
                self._undo_forward = watched.take_off
                self._finder = AuxiliaryModelFinder(self._progress, model, watched)
                self._progress.links.facts.evaluations.usual_from(self._progress.completed)
                self._add(self._finder)
                self._pause_s, self._due = _FIRST_PAUSE_S, time.monotonic() + _FIRST_PAUSE_S
        if optimizer is not None:
            self.watch_step(optimizer)

    @guarded
    def named(self, optimizer: Optimizer) -> None:
        """Watches an optimizer that the user named, even where torch's hooks do not see its class."""
        if is_foreign(optimizer):
            self.watch_step(optimizer)

    def watch_step(self, optimizer: Optimizer) -> None:
        """Times the steps of one more optimizer from outside."""
        owner = optimizer if "step" in optimizer.__dict__ else type(optimizer)
        known = self._undo_steps.get(id(owner))
        if known is not None and known[0]() is owner:
            return
        self._undo_steps = {key: item for key, item in self._undo_steps.items() if item[0]() is not None}
        if len(self._undo_steps) < _MOST_OPTIMIZERS:
            self._undo_steps[id(owner)] = weakref.ref(owner), watch_whole_step(optimizer)

    def poll(self) -> None:
        """Now and then repeats the search for auxiliary models and for a lost model. Called on the sender's thread."""
        if self._progress.selection.has_lost_model():
            self._add(self._progress.selection)
        if self._finder is not None and time.monotonic() >= self._due:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._due = time.monotonic() + self._pause_s
            self._add(self._finder)

    def take_off(self) -> None:
        if self._finder is not None:
            self._finder.remove()
        if self._undo_forward is not None:
            self._undo_forward()
        for _, undo in self._undo_steps.values():
            undo()
        self._undo_forward = self._finder = None
        self._undo_steps.clear()
