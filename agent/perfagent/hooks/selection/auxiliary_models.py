"""Watches the modules that the loop calls itself, besides the root model: a teacher, a discriminator, the other tower of
two; and the parts of a root that is never called, by a method such as `model.loss(x)`.

Calls of other models belong to the forward pass (without them two thirds of that of a distillation were `other`); many in
a row without gradients are an evaluation, as for the root. The first call of a part begins the forward pass.

One step with torch's hooks for all modules shows which modules these are: they have parameters, and no other module calls
them. The search is repeated now and then, since a discriminator may join late. Processes that compile anything are left
alone: code traced while those hooks are on is never compiled, and a watched part would break the graph of a method.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import TYPE_CHECKING, Any

from perfagent.boundary.call_slot import CALL, CallSlot, copy_that_calls
from perfagent.boundary.call_watch import replace
from perfagent.boundary.dynamo import compiled, keep_out_of_frames, not_traced, untraced
from perfagent.boundary.guard import guarded
from perfagent.hooks.evaluation import evaluated, interrupted
from perfagent.hooks.forward import WatchedModel, size_of_call
from perfagent.step.state import StepState, now, state
from perfagent.step.trace import DATA, FIELDS, FORWARD, forward_mode

if TYPE_CHECKING:
    from torch import nn

__all__ = ["AuxiliaryModelFinder"]

_MOST_MODELS = 64
_FETCH = FIELDS[DATA]


class AuxiliaryModelFinder:
    """A task that runs between two steps (causes/investigator.py): it records which modules are called from the end
    of one step to the end of the next. Those that it finds stay watched until `remove`."""

    def __init__(self, p: StepState, root: nn.Module, root_call: WatchedModel) -> None:
        self._progress, self._root, self.root_call = p, weakref.ref(root), root_call
        self._watched: list[WatchedCall] = []
        self._undo: list[Callable[[], None]] = []
        self._found: dict[int, weakref.ref[nn.Module]] = {}
        self._depth = 0
        self._off = False

    def at_boundary(self) -> bool:
        if self._undo:
            self._stop()
            self._watch()
            return False
        if self._off or self._root() is None or compiled():
            return False
        self._search()
        return True

    def remove(self) -> None:
        self._off = True
        self._stop()
        for each in self._watched:
            each.take_off()
        self._watched = []

    # ---- the step that is searched

    def _search(self) -> None:
        torch = sys.modules["torch"]
        hooks = torch.nn.modules.module
        self._found, self._depth = {}, 0
        self._undo = [
            hooks.register_module_forward_pre_hook(self._enters).remove,
            hooks.register_module_forward_hook(self._leaves, always_call=True).remove,
            replace(torch, "compile", self._stop),
        ]

    def _stop(self, *_args: object, **_kwargs: object) -> None:
        undo, self._undo = self._undo, []
        for each in undo:
            each()

    def _counts(self) -> bool:
        p = self._progress
        busy = p.backward_depth or p.phase_depth or p.data_depth
        return state.current is p and not busy and p.thread == get_ident()

    @untraced
    def _enters(self, module: nn.Module, _arguments: object) -> None:
        if self._counts():
            if not self._depth and any(_ids(module, "parameters")):
                self._found[id(module)] = weakref.ref(module)
            self._depth += 1

    @untraced
    def _leaves(self, _module: nn.Module, _arguments: object, _output: object) -> None:
        if self._depth and self._counts():
            self._depth -= 1

    # ---- the modules that were found

    def _watch(self) -> None:
        root, found = self._root(), [module for one in self._found.values() if (module := one()) is not None]
        self._found = {}
        if root is None or compiled():
            return
        own, parts = set(_ids(root, "parameters")), set(_ids(root, "modules"))
        inner = {part for module in found for part in _ids(module, "modules") if part != id(module)}
        new: list[WatchedCall] = []
        for module in found:
            if id(module) in inner or not _may_be_watched(module):
                continue
            if own.isdisjoint(_ids(module, "parameters")):
                new.append(WatchedCall(self, module, module.training))
            elif id(module) in parts:
                new.append(WatchedCall(self, module, None))
        new = new[: _MOST_MODELS - len(self._watched)]
        if new:
            for each in new:
                each.put_on()
            self._watched += new
            self._progress.links.facts.watched_from = self._progress.completed + 1
            keep_out_of_frames()

    # ---- calls of parts

    def is_training(self) -> bool:
        """Whether any part is in training mode. The root is not asked: a script that never calls it may not set its mode."""
        for one in self._watched:  # noqa: SIM110 - any() takes 1 µs more at each call of a part
            if one._mode is None and (part := one._module()) is not None and part.training:
                return True
        return False

    @guarded
    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begins the forward pass, unless it runs."""
        p, training = self._progress, self.is_training()
        if forward_mode(p.trace) is training:
            return
        began, at = now(), len(p.trace)
        p.opened = True
        if not training:
            interrupted(p)
        fetched = at >= _FETCH and p.trace[_FETCH - 1] == DATA
        size = None if fetched else size_of_call(p, args, kwargs)
        p.trace.extend((began, None if p.clock is None else p.clock.mark(), training, size, FORWARD))


def _ids(module: nn.Module, of: str) -> Iterator[int]:
    """Yields the ids of its "parameters" or "modules". Calls torch's own functions, since a script may define a
    function of that name that needs arguments, returns a list, or raises."""
    with contextlib.suppress(Exception):
        yield from map(id, getattr(sys.modules["torch"].nn.Module, of)(module))


def _may_be_watched(module: nn.Module) -> bool:
    torch = sys.modules["torch"]
    replicated = isinstance(module, (torch.jit.ScriptModule, torch.nn.DataParallel))
    return hasattr(module, CALL) and module.__dict__.get(CALL) is None and not replicated


class WatchedCall(CallSlot):
    """Replaces the call of another model, or of a part of the root. mode: a model's mode in training; in the other mode it
    is evaluated. None for a part."""

    __slots__ = ("_finder", "_grad_enabled", "_mode")

    def __init__(self, finder: AuxiliaryModelFinder, module: nn.Module, mode: bool | None) -> None:
        super().__init__(module)
        self._finder, self._mode = finder, mode
        self._grad_enabled = sys.modules["torch"].is_grad_enabled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        copy = copy_that_calls(sys._getframe(1), module)
        if copy is not None:
            return copy._call_impl(*args, **kwargs)
        call = self._replaced or module._call_impl  # the module is alive, since it is calling us
        p, finder, graded = state.current, self._finder, self._grad_enabled()
        if p is None or p.backward_depth or p.phase_depth or p.thread != get_ident():
            return call(*args, **kwargs)
        if self._mode is not None:
            if graded and forward_mode(p.trace) is not None:
                return call(*args, **kwargs)
            return evaluated(p, module.training == self._mode, call, args, kwargs, graded=graded)
        if finder.root_call.called_at == p.completed:
            return call(*args, **kwargs)
        if not graded:
            return evaluated(p, finder.is_training(), call, args, kwargs)
        finder.begin_forward(args, kwargs)
        return call(*args, **kwargs)


not_traced(WatchedCall.__call__)
