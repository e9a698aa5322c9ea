"""Times the forward pass where the script never calls the model itself: `model.loss(x)`, a method that calls
the model's parts.

The first call of a part begins the forward pass, which then lasts until backward starts. The parts are watched only
after whole steps without a call of the root, and not where anything was compiled: inside a compiled method they would
break its graph.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from itertools import islice
from threading import get_ident
from typing import Any

from perfagent.boundary.call_slot import Standing, anything_compiled, copy_that_calls
from perfagent.boundary.dynamo import keep_out_of_frames, not_traced
from perfagent.boundary.guard import failed, failures
from perfagent.hooks.evaluation import evaluated, interrupted
from perfagent.hooks.forward import Watched, size_of_call
from perfagent.step.state import StepState, now, state
from perfagent.step.trace import DATA, FIELDS, FORWARD, backward_since

__all__ = ["Uncalled"]

_PATIENCE = 2
"""Whole steps without a call of the root before its parts are watched."""
_MOST_PARTS = 256
_NAME = f"{__name__}.Part"
_FETCH = FIELDS[DATA]


class Uncalled:
    """A task that runs between two steps (rootcause/investigator.py): watches the parts of a model that is
    trained and not called."""

    def __init__(self, root: Any, watched: Watched) -> None:
        self._root, self.watched = weakref.ref(root), watched
        self._left = _PATIENCE
        self._parts: list[Part] = []
        self._off = False
        self._step, self._at, self._training = -1, 0, False  # at the newest call: step, length of the trace, mode

    def at_boundary(self) -> bool:
        root = self._root()
        if self._off or self.watched.called or root is None:
            return False
        self._left -= 1
        compiled = anything_compiled()
        if self._left <= 0 and compiled is None:
            return True
        if self._left <= 0 and not compiled:
            found = {id(part): part for part in islice(_parts(root), _MOST_PARTS)}  # a part with two names only once
            self._parts = [Part(self, part) for part in found.values()]
            for each in self._parts:
                each.put_on()
            keep_out_of_frames()
        return self._left > 0

    def remove(self) -> None:
        self._off = True
        for part in self._parts:
            part.take_off()
        self._parts = []

    def is_training(self) -> bool:
        root = self._root()
        return root is not None and bool(root.training)

    def begins(self, p: StepState) -> bool:
        """True for the first call since the last backward pass."""
        at, training = len(p.trace), self.is_training()
        same = p.completed == self._step and training == self._training and at >= self._at
        first = not same or (at > self._at and backward_since(p.trace, self._at))
        self._step, self._at, self._training = p.completed, at, training
        return first


class Part(Standing):
    """Replaces the call of one part, as `Watched` does for a root."""

    __slots__ = ("_grad_enabled", "_owner")

    def __init__(self, owner: Uncalled, part: Any) -> None:
        super().__init__(part)
        self._owner, self._grad_enabled = owner, sys.modules["torch"].is_grad_enabled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part: Any = self._module()
        copy = copy_that_calls(sys._getframe(1), part)
        if copy is not None:
            return copy._call_impl(*args, **kwargs)
        call = self._replaced or part._call_impl  # the part is alive, since it is calling us
        p, owner = state.current, self._owner
        if p is None or p.backward_depth or p.phase_depth or owner.watched.called or p.thread != get_ident():
            return call(*args, **kwargs)
        if not self._grad_enabled():
            return evaluated(p, owner.is_training(), call, args, kwargs)
        if _NAME not in failures:
            try:
                if owner.begins(p):
                    began = now()
                    p.opened = True
                    training = owner.is_training()
                    if not training:
                        interrupted(p)
                    event = None if p.clock is None else p.clock.mark()
                    p.trace.extend((began, event, training, _size(p, args, kwargs), FORWARD))
            except Exception as error:  # noqa: BLE001 - it must not reach the training loop
                failed(_NAME, error)
        return call(*args, **kwargs)


not_traced(Part.__call__)


def _size(p: StepState, args: Any, kwargs: Any) -> Any:
    fetched = len(p.trace) >= _FETCH and p.trace[_FETCH - 1] == DATA
    return None if fetched else size_of_call(p, args, kwargs)


def _parts(module: Any) -> Iterator[Any]:
    """Yields what the methods of a module can call: its children, and those of containers, which cannot be called."""
    torch = sys.modules["torch"]
    for child in module.__dict__.get("_modules", {}).values():
        if type(child) in (torch.nn.ModuleList, torch.nn.ModuleDict):
            yield from _parts(child)
        elif child is not None and not isinstance(child, (torch.jit.ScriptModule, torch.nn.DataParallel)):
            yield child
