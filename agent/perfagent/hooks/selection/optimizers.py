"""Selects the primary optimizer, whose steps are the run's steps, and finds the model that it trains.

The primary optimizer owns most parameters. It is chosen when the first optimizer steps. Later it may be gone (the next
fold, the next trial of a search), be smaller than a new one, or rest while another one trains (a second stage). Loops
that create an optimizer for an inner loop and drop it again (meta-learning) are counted by their outer optimizer.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfagent.boundary.guard import guarded
from perfagent.hooks.selection.models import numbers_trained, own_count, parameters_by_id, root_of, search
from perfagent.measure.tensor_storage import numbers_in
from perfagent.step.state import now
from perfagent.step.trace import FIELDS, OPTIMIZER_END

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

    from perfagent.step.state import StepState

__all__ = ["OptimizerSelection"]

_PATIENCE = 64
"""Steps of a smaller optimizer, without one of the primary, after which the smaller one takes over (a second stage)."""
_UNPROVEN = 10
"""_PATIENCE if the primary one has never stepped: a GAN's critic takes 5 steps for each step of the generator (Arjovsky
2017). Also the same for the first steps of another one of equal size: the next member of an ensemble, all of which are
kept."""
_SAME = 0.9
"""Share of the primary's parameters that another one must train to count at once as the next stage of the same
training: an encoder's optimizer next to that of the whole autoencoder steps in turn with it."""
_SEARCHES, _PAUSE = 8, 100
"""The first so many models are searched for at once (the folds of a cross-validation). Then the next search waits so many
times as long as the last one took: it takes 0.15 s, and loops of meta-learning restart hundreds of times."""


@dataclass(slots=True)
class _Other:
    """An optimizer besides the primary one. made: its steps since the primary one's newest step, at which `completed` was
    `at` (-1: none since the primary one became that). patience: with how many it takes over."""

    ref: weakref.ref[Optimizer]
    at: int = -1
    patience: int = 0
    made: int = 0


class OptimizerSelection:
    """The optimizers and the model of one run. On the training thread, but for `primary`, `model`, `all` and
    `has_lost_model`.

    began: `completed` when the primary optimizer became that.
    model_size: number of trainable parameters of the model that the script named.
    """

    __slots__ = (
        "_model", "_next_search_ns", "_others", "_primary", "_progress", "_searches", "began",
        "model_size",
    )  # fmt: skip

    def __init__(self, progress: StepState) -> None:
        self._progress = progress
        self._primary: weakref.ref[Optimizer] | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self.began = -1
        self.model_size = self._searches = self._next_search_ns = 0
        self._others: dict[int, _Other] = {}

    @property
    def primary(self) -> Optimizer | None:
        return None if self._primary is None else self._primary()

    @property
    def model(self) -> nn.Module | None:
        """The trained model; None if it is not known, or gone."""
        return None if self._model is None else self._model()

    @property
    def had_model(self) -> bool:
        return self._model is not None

    def trains(self, model: nn.Module | None) -> None:
        self._model = None if model is None else weakref.ref(model)

    def all(self) -> list[Optimizer]:
        """Returns the primary optimizer, and those that step besides it (a discriminator's, one for the embeddings)."""
        known = [self.primary, *(other.ref() for other in list(self._others.values()))]
        return list({id(one): one for one in known if one is not None}.values())

    # ---- the primary optimizer

    def ensure_primary(self, optimizer: Optimizer) -> None:
        """Selects a primary optimizer when this one is about to step and there is none, or it is gone. (With a closure, its
        gradients are measured within the step.)"""
        if self._primary is None:
            self._choose(optimizer)
        else:
            self.maybe_replace_primary(optimizer)

    def _choose(self, optimizer: Optimizer) -> None:
        """When the first optimizer steps, looks for a larger one that shares no parameter with it."""
        chosen = optimizer
        if not self.model_size or numbers_trained(optimizer) < self.model_size:  # else it owns all of the model
            modules, others = search(models=not self.model_size)
            if _larger(optimizer, others):
                modules, others = [], []
                gc.collect()  # an optimizer of a finished training may live on in a cycle: 0.2 s, once
                modules, others = search(models=not self.model_size)
            chosen = max(_larger(optimizer, others), key=numbers_trained, default=optimizer)
            self.trains(root_of(chosen, modules) or self.model)
        self.make_primary(chosen)

    def make_primary(self, optimizer: Optimizer) -> None:
        p, key = self._progress, id(optimizer)

        def forget(gone: weakref.ref[Optimizer]) -> None:
            if p.entered == key:
                p.entered = 0  # it raised in its step
            if self._primary is gone:
                p.primary_id = 0  # another object may get the same id

        self._primary, p.primary_id = weakref.ref(optimizer, forget), key
        self.began = p.completed
        p.links.joint_step.forget()

    def maybe_replace_primary(self, optimizer: Optimizer) -> bool:
        """Makes another optimizer the primary one if the old one is gone, smaller or replaced, or has not stepped for
        long."""
        primary = self.primary
        if primary is None:
            primary = self._outer_optimizer(numbers_trained(optimizer))
            if primary is not None:
                self.make_primary(primary)
            if primary is optimizer:
                return True
        if primary is not None and not self._displaces(optimizer, primary):
            return False
        self.make_primary(optimizer)
        for other in self._others.values():
            other.at = -1
        return True

    def _displaces(self, optimizer: Optimizer, primary: Optimizer) -> bool:
        p, size = self._progress, numbers_trained(primary)
        known = self._others.get(id(optimizer))
        if known is not None and known.ref() is not optimizer:
            known = None  # of another one that is gone
        if (known is None or known.at < 0) and (numbers_trained(optimizer) > size or _trains_same(optimizer, primary)):
            self._remember(optimizer)
            self._remember(primary)
            return True
        other = known or self._remember(optimizer)
        if other.at != p.completed:
            is_member = known is None and numbers_trained(optimizer) >= _SAME * size
            other.at, other.made = p.completed, 0
            other.patience = _UNPROVEN if is_member or p.last is None else _PATIENCE
        if other.made + 1 < other.patience:
            other.made += 1
            return False
        p.completed += other.made
        self._begin_after_last_end()
        self._remember(primary)
        return True

    def _outer_optimizer(self, size: int) -> Optimizer | None:
        """Called when the primary one is gone and one with `size` parameters is about to step. Returns an optimizer that
        stepped in between, trains as many and still exists: it was the outer one of two loops, and the lost one belonged
        to the inner loop."""
        seen = [other.ref() for other in self._others.values() if other.at >= 0]
        alive = [one for one in seen if one is not None and numbers_trained(one) >= size]
        return max(alive, key=numbers_trained, default=None)

    def _remember(self, optimizer: Optimizer) -> _Other:
        """Records an optimizer besides the primary one: its state takes memory, too."""
        others = {key: other for key, other in self._others.items() if other.ref() is not None}
        found = others.get(id(optimizer)) or _Other(weakref.ref(optimizer))
        if len(others) < _PATIENCE:
            others[id(optimizer)] = found
        self._others = others  # new, for other threads
        return found

    def _begin_after_last_end(self) -> None:
        """Lets the step that is about to end begin where the last step of any optimizer ended."""
        p = self._progress
        end = len(p.trace)
        while end and p.trace[end - 1] != OPTIMIZER_END:
            end -= FIELDS[p.trace[end - 1]]
        if end:
            p.step_end = p.trace[end - 3]
            del p.trace[:end]

    # ---- the model

    @guarded
    def find_first_model(self, optimizer: Optimizer) -> None:
        """Finds the model of the optimizer that made the first step, where the script named only the optimizer."""
        if not self.had_model:
            self.trains(root_of(optimizer, search(models=True)[0]))
            self._progress.links.gradient_schedule.found_model()

    @guarded
    def find_model(self, optimizer: Optimizer) -> None:
        """Finds the model of an optimizer that begins to count with the step that just ended, if the model is not known, as
        in the next fold or trial of a search. Does nothing right after another search, since some loops restart often."""
        model = self.model
        if model is not None:
            own = parameters_by_id(optimizer)
            if self.model_size or any(id(parameter) in own for parameter in model.parameters()):
                return
        if now() >= self._next_search_ns:
            self._search_model(optimizer)

    def _search_model(self, optimizer: Optimizer) -> None:
        p, began = self._progress, now()
        found = root_of(optimizer, search(models=True)[0])
        self._searches += 1
        if self._searches >= _SEARCHES:
            self._next_search_ns = now() + _PAUSE * (now() - began)
        self.trains(found)  # None: in no model; no search is needed while this optimizer counts
        if found is not None:
            p.links.gradient_schedule.found_model()
            p.links.on_next_model(self._goes_on(optimizer))

    def _goes_on(self, optimizer: Optimizer) -> bool:
        """True if the optimizer's own count, restored from a checkpoint, is that of the run: the same training with the
        model built anew."""
        made = own_count(optimizer)
        return made > _PATIENCE and abs(made - self._progress.completed) <= _UNPROVEN

    def has_lost_model(self) -> bool:
        """True if the model is gone and a search is allowed. Any thread."""
        is_lost = self.had_model and self.model is None
        return is_lost and bool(self._progress.primary_id) and now() >= self._next_search_ns

    def at_boundary(self) -> bool:
        """A task between two steps: finds a model that was not searched for when its training began."""
        primary = self.primary
        if primary is not None and self.has_lost_model():
            self._search_model(primary)
            self._progress.step_end = now()
        return False


def _larger(optimizer: Optimizer, others: Sequence[Optimizer]) -> list[Optimizer]:
    """Returns those that train more, and other parameters. One that has stepped, while this one has not, is left over from
    an earlier training."""
    mine, size = parameters_by_id(optimizer).keys(), numbers_trained(optimizer)
    rivals = [other for other in others if (optimizer.state or not other.state) and numbers_trained(other) > size]
    return [other for other in rivals if mine.isdisjoint(parameters_by_id(other))]


def _trains_same(optimizer: Optimizer, primary: Optimizer) -> bool:
    """True if it trains the primary one's parameters: the next stage."""
    before, after = parameters_by_id(primary), parameters_by_id(optimizer)
    return sum(numbers_in(before[one]) for one in before.keys() & after.keys()) >= _SAME * numbers_trained(primary)
