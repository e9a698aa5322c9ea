"""The model that a run trains, its optimizer, the device they are on, and the hooks on them.

The hooks are in place from the first step on, since torch.compile would trace them before, until the run ends or goes on
with another model.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from perfagent.boundary.guard import guarded
from perfagent.device import accelerator, devices_of
from perfagent.device.memory import chosen_device, device_in_use
from perfagent.hooks.forward import watch_forward
from perfagent.hooks.optimizer_step import watch_optimizer
from perfagent.hooks.selection.auxiliary_models import AuxiliaryModelFinder
from perfagent.measure.batches.padding import has_embedding

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from perfagent.delivery.handoff import Handoff
    from perfagent.step.state import StepState

__all__ = ["Trained"]

_MOST_OPTIMIZERS = 8


class Trained:
    """What one run trains."""

    def __init__(self, progress: StepState, handoff: Handoff) -> None:
        self._progress, self._handoff = progress, handoff
        self._named: weakref.ref[nn.Module] | None = None
        who = handoff.identity
        self._device: int | None = None
        self._likely_device = chosen_device(first=who.world_size > 1 and who.local_rank == 0)
        self._undo_forward: Callable[[], None] | None = None
        self.finder: AuxiliaryModelFinder | None = None
        self._undo_steps: dict[int, tuple[weakref.ref[Any], Callable[[], None]]] = {}
        progress.links.on_next_model = self._next_model
        progress.links.on_next_optimizer = self.watch_step

    def model(self) -> nn.Module | None:
        """None where it is not known, and where the script has dropped it."""
        return self._progress.selection.model

    def optimizer(self) -> Optimizer | None:
        return self._progress.selection.primary

    def device(self) -> int | None:
        """The index of this rank's device: that of the parameters it trains. Before its first step, and where it never
        steps an optimizer: that of the model that the script named, else the one that it had chosen, else that on which
        it has most memory. On the sender's thread and the courier's."""
        if self._device is not None:
            return self._device
        model = self.model()
        first = next(iter(model.parameters()), None) if model is not None else None
        if first is not None and first.device.type not in ("cpu", "meta"):
            return int(first.device.index)
        if self._likely_device is None:
            self._likely_device = device_in_use()
        return self._likely_device

    def note_device(self, optimizer: Optimizer | None) -> None:
        """At the first step of the optimizer that counts."""
        backend, found = accelerator(), devices_of(optimizer)
        if found:
            self._device = found[0].index
        elif self._device is None and backend.in_use():
            self._device = backend.current_index()

    # ---- what the script says, and what the hooks find

    def is_next(self, model: nn.Module | None) -> bool:
        """Whether the run has steps, and this model was not named before."""
        known = None if self._named is None else self._named()
        return self._progress.last is not None and model is not None and model is not known

    def is_another(self, model: nn.Module | None) -> bool:
        """Whether this run has trained, and not that model (or one that is part of it, or that it is part of)."""
        if model is None or self._progress.last is None or not self._progress.selection.had_model:
            return False
        known = self.model()  # None: it is gone
        return known is None or not (_holds(known, model) or _holds(model, known))

    def name(self, model: Any, optimizer: Any) -> None:
        """What the script says that it trains; None for what it does not say."""
        if model is not None:
            self._named = weakref.ref(model)
            self._progress.selection.trains(model)
            self._progress.selection.model_size = _trainable(model)
            if self._progress.last is not None:
                self._watch_again()
        if optimizer is not None:
            inner = getattr(optimizer, "optimizer", None)  # Accelerate's wrapper
            trained_by: Any = inner if hasattr(inner, "param_groups") else optimizer
            self._progress.selection.make_primary(trained_by)
            self._watch_foreign(trained_by)

    @guarded
    def _watch_foreign(self, optimizer: Optimizer) -> None:
        """Before the first step, which torch's hooks would not see."""
        if _is_foreign(optimizer):
            self.watch_step(optimizer)

    def _next_model(self, goes_on: bool) -> None:
        """The process trains another model, which the hooks have found. goes_on: as the same training, resumed."""
        self._named = None
        self.note_device(self.optimizer())
        if not goes_on:
            self._handoff.event("state", {"state": "running", "training_after": self._progress.selection.began})
        self._watch_again()

    # ---- the hooks

    def watch(self) -> None:
        """Watches the model and the optimizer, as far as they are known. Hooks already in place stay."""
        model, optimizer, facts = self.model(), self.optimizer(), self._progress.links.facts
        if model is not None and self._undo_forward is None:
            facts.embedded = has_embedding(model)
            watched = watch_forward(model)
            if watched is not None:
                self._undo_forward = watched.take_off
                self.finder = AuxiliaryModelFinder(self._progress, model, watched)
                facts.watched_from = self._progress.completed
                self._progress.links.investigator.add(self.finder)
        if optimizer is not None:
            self.watch_step(optimizer)

    def watch_step(self, optimizer: Optimizer) -> None:
        """Times the steps of one more optimizer from outside."""
        owner = optimizer if "step" in optimizer.__dict__ else type(optimizer)
        known = self._undo_steps.get(id(owner))
        if known is not None and known[0]() is owner:
            return
        self._undo_steps = {key: item for key, item in self._undo_steps.items() if item[0]() is not None}
        if len(self._undo_steps) < _MOST_OPTIMIZERS:
            self._undo_steps[id(owner)] = weakref.ref(owner), watch_optimizer(optimizer)

    def take_off(self) -> None:
        if self.finder is not None:
            self.finder.remove()
        if self._undo_forward is not None:
            self._undo_forward()
        for _, undo in self._undo_steps.values():
            undo()
        self._undo_forward = self.finder = None
        self._undo_steps.clear()

    def _watch_again(self) -> None:
        self.take_off()
        self.watch()


def _holds(model: nn.Module, part: nn.Module) -> bool:
    return any(module is part for module in model.modules())


def _is_foreign(optimizer: Any) -> bool:
    """True if torch's hooks see neither its steps nor those of an optimizer that it holds: its class is not torch's, or
    never called torch's `__init__`."""
    own = getattr(optimizer, "__dict__", {})
    if not hasattr(type(optimizer), "step") or hasattr(type(optimizer).step, "hooked") or "step" in own:
        return False
    kind = sys.modules["torch"].optim.Optimizer
    return not any(issubclass(type(held), kind) for held in own.values())


def _trainable(model: nn.Module) -> int:
    """Trainable numbers of a model; those of lazy modules are not known before their first call."""
    is_lazy = sys.modules["torch"].nn.parameter.is_lazy
    return sum(p.numel() for p in model.parameters() if p.requires_grad and not is_lazy(p))
