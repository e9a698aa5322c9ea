"""Selects the primary optimizer, whose steps are the run's steps, and finds the model that it trains.

The primary optimizer owns most parameters. It is chosen when the first optimizer steps. Later it may be gone (the next
fold, the next trial of a search), be smaller than a new one, or rest while another one trains (a second stage). Loops
that create an optimizer for an inner loop and drop it again (meta-learning) are counted by their outer optimizer.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from perfagent.hooks.model_discovery import owned, parameters_of, root_of, search
from perfagent.signals.tensor_storage import numbers_in
from perfagent.step.state import StepState, now
from perfagent.step.trace import OPTIMIZER_END, entries_of, trace_of

__all__ = ["Lost", "appoint", "follow", "make_primary", "takes_over"]

_PATIENCE = 64
"""Steps of a smaller optimizer, without one of the primary, after which the smaller one takes over (a second stage)."""
_UNPROVEN = 10
"""The same if the primary one has never stepped: a GAN's critic takes 5 steps for each step of the generator (Arjovsky
2017). Also the same for an optimizer of equal size that appears after so many steps of the primary one alone: another
member of an ensemble, all of which are kept."""
_SAME = 0.9
"""Share of the primary's parameters that another one must train to count at once as the next stage of the same
training: an encoder's optimizer next to that of the whole autoencoder steps in turn with it."""
_LOOKS = 8
# A search takes 0.15 s: for each fold, trial or task that was 100 times the training's time in meta-learning.
"""The first so many models are searched for at once (the folds of a cross-validation)."""
_PAUSES = 100
"""After those, the next search waits so many times as long as the last one took: loops of meta-learning restart
hundreds of times."""


def appoint(p: StepState, optimizer: Any) -> None:
    """Selects a primary optimizer when this one is about to step and there is none, or it is gone. (With a closure, its
    gradients are measured within the step.)"""
    if p.selection.primary is None:
        _choose(p, optimizer)
    else:
        takes_over(p, optimizer)


def _choose(p: StepState, optimizer: Any) -> None:
    """When the first optimizer steps, looks for a larger one that shares no parameter with it."""
    mine, size = parameters_of(optimizer), owned(optimizer)
    larger: list[tuple[Any, Any]] = []
    found = None
    if (
        not p.selection.model_size or size < p.selection.model_size
    ):  # otherwise it owns all of the model that the user named
        modules, others = search(models=not p.selection.model_size)
        # an optimizer that has stepped, while this one has not, is left over from an earlier training
        others = [other for other in others if other is not optimizer and (optimizer.state or not other.state)]
        others = [other for other in others if owned(other) > size and not mine.keys() & parameters_of(other).keys()]
        larger = [(weakref.ref(other), _root_in(modules, other)) for other in others]
        found = _root_in(modules, optimizer)
        del modules, others
    if larger:
        gc.collect()  # an optimizer of a finished training may live on in a cycle: 0.2 s, once, only where useful
    alive = [(other, root) for one, root in larger if (other := one()) is not None]
    chosen, found = max(alive, key=lambda pair: owned(pair[0]), default=(optimizer, found))
    make_primary(p, chosen)
    if found is not None:
        p.selection.found = found


def _root_in(modules: list[Any], optimizer: Any) -> Any:
    """Returns a weak reference to the model that the optimizer trains; None if it is none of these."""
    root = root_of(optimizer, modules)
    return None if root is None else weakref.ref(root)


def make_primary(p: StepState, optimizer: Any) -> None:
    def forget(gone: Any) -> None:
        if p.selection.primary is gone:
            p.primary_id = 0  # another object may get the same id

    p.selection.primary, p.primary_id = weakref.ref(optimizer, forget), id(optimizer)
    p.selection.began = p.selection.alone_since = p.completed
    p.links.together.forget()


def takes_over(p: StepState, optimizer: Any, rate: Any = None) -> bool:
    """Decides whether another optimizer becomes the primary one: the old one is gone, smaller or replaced, or has not
    stepped for long. rate: the learning rate of this step, if the optimizer no longer has it."""
    primary, before = p.selection.primary() if p.selection.primary is not None else None, p.completed
    if primary is None:
        primary = _heir(p, owned(optimizer))
        if primary is not None:
            make_primary(p, primary)
        if primary is optimizer:
            return True
    if primary is not None:
        known = p.selection.steppers.get(id(optimizer))
        new = known is None or _is_gone(p, optimizer)
        steps = known[1] + 1 if known is not None and not new and known[0] == p.completed else 1
        at_once = new and (owned(optimizer) > owned(primary) or _replaces(p, optimizer, primary))
        patience = _patience(p, optimizer, primary, steps, new=new)
        if new:
            _remember(p, optimizer)
        rates = known[2] if known is not None and steps > 1 else []
        p.selection.steppers[id(optimizer)] = p.completed, steps, rates
        if not at_once and steps < patience:
            rates.append(_rate(optimizer, rate))
            return False
        if not at_once:
            _was_alone(p, rates)
        _remember(p, primary)
    make_primary(p, optimizer)
    p.selection.alone_since = before
    p.selection.steppers.clear()
    return True


def _heir(p: StepState, size: int) -> Any:
    """Called when the primary one is gone and one with `size` parameters is about to step. Returns an optimizer that
    stepped in between, trains as many and still exists: it was the outer one of two loops, and the lost one belonged
    to the inner loop."""
    beside = [
        one
        for key in p.selection.steppers
        if key in p.selection.beside and (one := p.selection.beside[key]()) is not None
    ]
    return max((one for one in beside if owned(one) >= size), key=owned, default=None)


def _is_gone(p: StepState, optimizer: Any) -> bool:
    """True if the records under this optimizer's id are those of another one that is gone."""
    seen = p.selection.beside.get(id(optimizer))
    return seen is not None and seen() is not optimizer


def _patience(p: StepState, optimizer: Any, primary: Any, steps: int, *, new: bool) -> int:
    """Returns how many steps in a row this optimizer must make to take over. steps: so far. new: not in `steppers`."""
    if p.last is None:
        return _UNPROVEN
    me = id(optimizer)
    if steps == 1:
        if new and (me not in p.selection.beside or _is_gone(p, optimizer)):
            quiet = p.completed - max(
                (then for then, *_ in p.selection.steppers.values()), default=p.selection.alone_since
            )
            if quiet >= _UNPROVEN and owned(optimizer) >= _SAME * owned(primary):
                p.selection.newcomer = me
        elif p.selection.newcomer == me:
            p.selection.newcomer = 0  # the primary one has stepped again
    return _UNPROVEN if p.selection.newcomer == me else _PATIENCE


def _remember(p: StepState, optimizer: Any) -> None:
    """Records an optimizer besides the primary one: its state takes memory, too."""
    gone = {key for key, one in p.selection.beside.items() if one() is None}
    p.selection.beside = {
        key: one for key, one in p.selection.beside.items() if key not in gone
    }  # a new dict, for other threads
    p.selection.steppers = {key: seen for key, seen in p.selection.steppers.items() if key not in gone}
    if len(p.selection.beside) < _PATIENCE:
        p.selection.beside[id(optimizer)] = weakref.ref(optimizer)


def _replaces(p: StepState, optimizer: Any, primary: Any) -> bool:
    """True if it trains the primary one's parameters: the next stage. If the two step in turn, there are no stages, and
    the first one keeps counting."""
    before, after = parameters_of(primary), parameters_of(optimizer)
    shared = sum(numbers_in(before[one]) for one in before.keys() & after.keys())
    if p.selection.take_turns or shared < _SAME * owned(primary):
        return False
    first, at = p.selection.overtaken
    p.selection.take_turns = first == id(optimizer) and p.completed - at < _UNPROVEN
    p.selection.overtaken = id(primary), p.completed
    return True


def _rate(optimizer: Any, rate: Any) -> float | None:
    """Returns the learning rate for a step that may turn out to be one of the run's; None if it may be on a device."""
    if rate is None and optimizer.param_groups:
        rate = optimizer.param_groups[0].get("lr")
    return rate if isinstance(rate, float) else None


def _was_alone(p: StepState, rates: list[float | None]) -> None:
    """Turns the steps that an optimizer made while the primary one made none into the run's steps: a linear probe, the
    next model of several. rates: their learning rates, without the step that is about to end. If others stepped in
    between, these steps have no rows."""
    kind, entries = type(p.trace), entries_of(p.trace)
    ends = [at + 1 for at, entry in enumerate(entries) if entry[0] == OPTIMIZER_END]
    if len(ends) == len(rates):
        for begin, end, rate in zip((0, *ends), ends, rates, strict=False):
            p.complete_late(kind(trace_of(entries[begin:end])), rate)
    else:
        p.completed += len(rates)
    if ends:
        p.step_end = entries[ends[-1] - 1][1]
        p.trace = kind(trace_of(entries[ends[-1] :]))


# ---- the model


def follow(p: StepState, optimizer: Any) -> None:
    """Finds the model of an optimizer that begins to count with the step that just ended, if the model is not known, as
    in the next fold or trial of a search. Does nothing right after another search, since some loops restart often."""
    if not _is_known(p, optimizer) and now() >= p.selection.look_at:
        _find_model(p, optimizer)


def _is_known(p: StepState, optimizer: Any) -> bool:
    """True if the model still exists, and the user named it or this optimizer trains some of its parameters."""
    model = p.selection.found() if p.selection.found is not None else None
    if model is None:
        return False
    own = parameters_of(optimizer)
    return bool(p.selection.model_size) or any(id(parameter) in own for parameter in model.parameters())


def _find_model(p: StepState, optimizer: Any) -> None:
    began = now()
    found = _root_in(search(models=True)[0], optimizer)
    p.selection.looks += 1
    if p.selection.looks >= _LOOKS:
        p.selection.look_at = now() + _PAUSES * (now() - began)
    p.selection.found = found  # None: in no model; no search is needed while this optimizer counts
    if found is None:
        return
    p.links.health.found_model()
    if p.links.on_next_model is not None:
        p.links.on_next_model(_goes_on(p, optimizer))


def _goes_on(p: StepState, optimizer: Any) -> bool:
    """True if the optimizer's own count, restored from a checkpoint, is that of the run: the same training with the model
    built anew. Counts on a device are not read."""
    count = next((one["step"] for one in optimizer.state.values() if "step" in one), 0)
    made = int(count) if isinstance(count, int) or getattr(count, "is_cpu", False) else 0
    return made > _PATIENCE and abs(made - p.completed) <= _UNPROVEN


class Lost:
    """A task that runs between two steps (rootcause/investigator.py): finds a model that was not searched for when
    its training began."""

    def __init__(self, progress: StepState) -> None:
        self._progress = progress

    def is_due(self) -> bool:
        """True if the model is gone and a search is allowed. Any thread."""
        p = self._progress
        found = p.selection.found
        return found is not None and found() is None and bool(p.primary_id) and now() >= p.selection.look_at

    def at_boundary(self) -> bool:
        p = self._progress
        primary = p.selection.primary() if p.selection.primary is not None else None
        if primary is not None and self.is_due():
            _find_model(p, primary)
            p.step_end = now()
        return False
