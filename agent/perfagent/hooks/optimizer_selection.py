"""Which optimizer's steps are the run's steps: the primary one, which owns most parameters; and the model that it trains.

It is chosen when the first optimizer steps. Later it may be gone (the next fold, the next trial of a search), be smaller than one
that comes, or rest while another one trains (a second stage). Loops that make an optimizer for an inner loop and drop it again
(meta-learning) have their outer one to count by.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from perfagent.hooks.model_discovery import owned, parameters_of, root_of, search
from perfagent.signals.tensor_storage import numbers_in
from perfagent.step.state import Progress, now
from perfagent.step.trace import OPTIMIZER_END, entries_of, trace_of

__all__ = ["Lost", "appoint", "follow", "make_primary", "takes_over"]

_PATIENCE = 64
"""Steps without one of the primary optimizer after which a smaller one takes its place (a second stage of training)."""
_UNPROVEN = 10
"""The same where the primary one has never stepped: a GAN's critic takes 5 steps to one of the generator (Arjovsky 2017). And of
one as large that comes when the primary one has stepped so often alone: another member of an ensemble, all of which are kept."""
_SAME = 0.9
"""Share of the primary's numbers that another one must train to be taken for the next stage of the same training at once: an
encoder's optimizer beside that of the whole autoencoder steps in turn with it."""
_LOOKS = 8
"""So many models are looked for at once (the folds of a cross-validation)."""
_PAUSES = 100
"""From then on, so many times as long as a look took there is no other: loops of meta-learning begin anew hundreds of times."""


def appoint(p: Progress, optimizer: Any) -> None:
    """There is no primary optimizer, or it is gone, and this one is about to step. (With a closure its gradients are to be looked
    at in the midst of the step.)"""
    if p.primary is None:
        _choose(p, optimizer)
    else:
        takes_over(p, optimizer)


def _choose(p: Progress, optimizer: Any) -> None:
    """The first optimizer steps: is there one that owns more, and none of the same parameters?"""
    mine, size = parameters_of(optimizer), owned(optimizer)
    larger: list[tuple[Any, Any]] = []
    found = None
    if not p.model_size or size < p.model_size:  # else it owns all of the model that the user named
        modules, others = search(models=not p.model_size)
        # one that has stepped, while this one has not, is left over from an earlier training
        others = [other for other in others if other is not optimizer and (optimizer.state or not other.state)]
        others = [other for other in others if owned(other) > size and not mine.keys() & parameters_of(other).keys()]
        larger = [(weakref.ref(other), _root_in(modules, other)) for other in others]
        found = _root_in(modules, optimizer)
        del modules, others
    if larger:
        gc.collect()  # one of a training that is over may live on in a cycle: 0.2 s, once, and only where it can be of use
    alive = [(other, root) for one, root in larger if (other := one()) is not None]
    chosen, found = max(alive, key=lambda pair: owned(pair[0]), default=(optimizer, found))
    make_primary(p, chosen)
    if found is not None:
        p.found = found


def _root_in(modules: list[Any], optimizer: Any) -> Any:
    """A weak reference to the model that it trains; None where none of them is."""
    root = root_of(optimizer, modules)
    return None if root is None else weakref.ref(root)


def make_primary(p: Progress, optimizer: Any) -> None:
    def forget(gone: Any) -> None:
        if p.primary is gone:
            p.primary_id = 0  # another object may get the same id

    p.primary, p.primary_id = weakref.ref(optimizer, forget), id(optimizer)
    p.began = p.alone_since = p.completed
    p.together.forget()


def takes_over(p: Progress, optimizer: Any, rate: Any = None) -> bool:
    """Whether an optimizer that is not the primary becomes it: the old one is gone, smaller or replaced, or has not stepped for
    long. rate: where the optimizer no longer has that of its step."""
    primary, before = p.primary() if p.primary is not None else None, p.completed
    if primary is None:
        primary = _heir(p, owned(optimizer))
        if primary is not None:
            make_primary(p, primary)
        if primary is optimizer:
            return True
    if primary is not None:
        known = p.steppers.get(id(optimizer))
        new = known is None or _is_gone(p, optimizer)
        steps = known[1] + 1 if known is not None and not new and known[0] == p.completed else 1
        at_once = new and (owned(optimizer) > owned(primary) or _replaces(p, optimizer, primary))
        patience = _patience(p, optimizer, primary, steps, new=new)
        if new:
            _remember(p, optimizer)
        rates = known[2] if known is not None and steps > 1 else []
        p.steppers[id(optimizer)] = p.completed, steps, rates
        if not at_once and steps < patience:
            rates.append(_rate(optimizer, rate))
            return False
        if not at_once:
            _was_alone(p, rates)
        _remember(p, primary)
    make_primary(p, optimizer)
    p.alone_since = before
    p.steppers.clear()
    return True


def _heir(p: Progress, size: int) -> Any:
    """The primary one is gone, and one of this size is about to step: another one that stepped in between, trains as much and is
    still there was the outer one of two loops, and what is gone belonged to the inner."""
    beside = [one for key in p.steppers if key in p.beside and (one := p.beside[key]()) is not None]
    return max((one for one in beside if owned(one) >= size), key=owned, default=None)


def _is_gone(p: Progress, optimizer: Any) -> bool:
    """Whether what is known under its id is of another one, which is no more."""
    seen = p.beside.get(id(optimizer))
    return seen is not None and seen() is not optimizer


def _patience(p: Progress, optimizer: Any, primary: Any, steps: int, *, new: bool) -> int:
    """How many steps in a row this one must make to take over. steps: that it has made. new: it is not among the steppers."""
    if p.last is None:
        return _UNPROVEN
    me = id(optimizer)
    if steps == 1:
        if new and (me not in p.beside or _is_gone(p, optimizer)):
            quiet = p.completed - max((then for then, *_ in p.steppers.values()), default=p.alone_since)
            if quiet >= _UNPROVEN and owned(optimizer) >= _SAME * owned(primary):
                p.newcomer = me
        elif p.newcomer == me:
            p.newcomer = 0  # the primary one has stepped again
    return _UNPROVEN if p.newcomer == me else _PATIENCE


def _remember(p: Progress, optimizer: Any) -> None:
    """An optimizer beside the primary one: its state takes memory too."""
    gone = {key for key, one in p.beside.items() if one() is None}
    p.beside = {key: one for key, one in p.beside.items() if key not in gone}  # another thread may be reading the old one
    p.steppers = {key: seen for key, seen in p.steppers.items() if key not in gone}
    if len(p.beside) < _PATIENCE:
        p.beside[id(optimizer)] = weakref.ref(optimizer)


def _replaces(p: Progress, optimizer: Any, primary: Any) -> bool:
    """Whether it trains what the primary one trained: the next stage. Where the two step in turn, they are no stages, and the
    one that was there first goes on counting."""
    before, after = parameters_of(primary), parameters_of(optimizer)
    shared = sum(numbers_in(before[one]) for one in before.keys() & after.keys())
    if p.take_turns or shared < _SAME * owned(primary):
        return False
    first, at = p.overtaken
    p.take_turns = first == id(optimizer) and p.completed - at < _UNPROVEN
    p.overtaken = id(primary), p.completed
    return True


def _rate(optimizer: Any, rate: Any) -> float | None:
    """None where it may be on a device: it is asked for in case that the step turns out to be one of the run's."""
    if rate is None and optimizer.param_groups:
        rate = optimizer.param_groups[0].get("lr")
    return rate if isinstance(rate, float) else None


def _was_alone(p: Progress, rates: list[float | None]) -> None:
    """The steps that it made beside the primary one, which made none, were steps of their own: a linear probe, the next model of
    several. rates: theirs, but for the one that is about to end. Where others stepped in between, they go without a row."""
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


# the model -------------------------------------------------------------------------------------------------------------------


def follow(p: Progress, optimizer: Any) -> None:
    """Another optimizer counts from the step on that is over now: finds its model where that is not the known one, as in the next
    fold or trial of a search. Not where a look took place just now: some loops begin anew again and again."""
    if not _is_known(p, optimizer) and now() >= p.look_at:
        _find_model(p, optimizer)


def _is_known(p: Progress, optimizer: Any) -> bool:
    """Whether the model is there, and is the one that the user named, or has parameters that this optimizer trains."""
    model = p.found() if p.found is not None else None
    if model is None:
        return False
    own = parameters_of(optimizer)
    return bool(p.model_size) or any(id(parameter) in own for parameter in model.parameters())


def _find_model(p: Progress, optimizer: Any) -> None:
    began = now()
    found = _root_in(search(models=True)[0], optimizer)
    p.looks += 1
    if p.looks >= _LOOKS:
        p.look_at = now() + _PAUSES * (now() - began)
    p.found = found  # None: it is in no model, and need not be looked for again while this optimizer counts
    if found is None:
        return
    p.health.found_model()
    if p.on_next_model is not None:
        p.on_next_model()


class Lost:
    """A task between two steps (rootcause/investigator.py): finds a model that was not looked for when its training began."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def is_due(self) -> bool:
        """Any thread."""
        p = self._progress
        return p.found is not None and p.found() is None and bool(p.primary_id) and now() >= p.look_at

    def at_boundary(self) -> bool:
        p = self._progress
        primary = p.primary() if p.primary is not None else None
        if primary is not None and self.is_due():
            _find_model(p, primary)
            p.step_end = now()
        return False
