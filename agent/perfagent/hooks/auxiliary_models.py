"""Watches the models that the loop calls besides the root model: a teacher, a discriminator, the other tower of two.

Their calls belong to the forward pass. Many calls in a row without gradients are an evaluation, as for the root
(evaluation.py).

One step with torch's hooks for all modules shows which models these are: they are not called by another module, have
parameters of their own and share none with the root. The search is repeated now and then, since a discriminator may
join late. Processes that compile anything are left alone: code traced while those hooks are on is never compiled.

Without these models, two thirds of the forward pass of a distillation, and a third of a GAN's, were `other`. A search
of all live modules takes 0.1 s and does not show which are called.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterator
from threading import get_ident
from typing import Any

from perfagent.boundary.call_slot import CALL, Standing, anything_compiled, copy_that_calls
from perfagent.boundary.dynamo import keep_out_of_frames, not_traced, untraced
from perfagent.hooks.evaluation import evaluated
from perfagent.step.state import StepState, state
from perfagent.step.trace import forward_runs

__all__ = ["Beside"]

_MOST_MODELS = 16
_MOST_CALLS = 500
"""Most calls by the loop itself in the step that is searched, since that step may hold an evaluation."""


class Beside:
    """A task that runs between two steps (rootcause/investigator.py): it records which models are called from the end
    of one step to the end of the next.

    The models that it finds stay watched until `remove`.
    """

    def __init__(self, p: StepState, root: Any) -> None:
        self._progress, self._root = p, weakref.ref(root)
        self._watched: list[Companion] = []
        self._handles: list[Any] = []
        self._undo_compile: Any = None
        self._found: dict[int, Any] = {}  # id of a module -> weak reference to it
        self._depth = self._calls = 0
        self._looking = self._off = False

    def at_boundary(self) -> bool:
        if self._looking:
            self._looking = False
            self._stop()
            self._watch()
            return False
        if self._off or self._root() is None:
            return False
        compiled = anything_compiled()
        if compiled is False:
            self._looking = True
            self._start()
        return not compiled

    def has_lost_one(self) -> bool:
        """True if a watched model is gone, since another may have taken its place. Any thread."""
        return any(each.is_gone() for each in self._watched)

    def remove(self) -> None:
        self._off = True
        self._looking = False
        self._stop()
        for each in self._watched:
            each.take_off()
        self._watched = []

    # ---- the step that is searched

    def _start(self) -> None:
        torch = sys.modules["torch"]
        hooks: Any = torch.nn.modules.module
        self._found, self._depth, self._calls = {}, 0, 0
        self._handles = [hooks.register_module_forward_pre_hook(self._enters)]
        self._handles.append(hooks.register_module_forward_hook(self._leaves, always_call=True))
        original = torch.compile

        @functools.wraps(original)
        def stop_and_compile(*args: Any, **kwargs: Any) -> Any:
            self._stop()
            return original(*args, **kwargs)

        def undo() -> None:
            if torch.compile is stop_and_compile:
                torch.compile = original  # type: ignore[attr-defined]

        torch.compile, self._undo_compile = stop_and_compile, undo  # type: ignore[attr-defined]

    def _stop(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        if self._undo_compile is not None:
            self._undo_compile()
            self._undo_compile = None

    def _counts(self) -> bool:
        p = self._progress
        return (
            state.current is p and not (p.backward_depth or p.phase_depth or p.data_depth) and p.thread == get_ident()
        )

    @untraced
    def _enters(self, module: Any, _arguments: Any) -> None:
        if not self._counts():
            return
        if not self._depth:
            known = self._found.get(id(module))
            if (known is None or known() is not module) and any(_ids(module, "parameters")):
                self._found[id(module)] = weakref.ref(module)
            self._calls += 1
            if self._calls >= _MOST_CALLS:
                self._stop()
        self._depth += 1

    @untraced
    def _leaves(self, _module: Any, _arguments: Any, _output: Any) -> None:
        if self._depth and self._counts():
            self._depth -= 1

    # ---- the models that were found

    def _watch(self) -> None:
        self._watched = [each for each in self._watched if not each.is_gone()]
        root: Any = self._root()
        found, self._found = [module for one in self._found.values() if (module := one()) is not None], {}
        if root is None or anything_compiled():
            return
        own = set(_ids(root, "parameters"))
        inner = {part for module in found for part in _ids(module, "modules") if part != id(module)}
        apart = [module for module in found if id(module) not in inner and own.isdisjoint(_ids(module, "parameters"))]
        new = [Companion(module) for module in filter(_may_be_watched, apart)]
        if not new or len(self._watched) + len(new) > _MOST_MODELS:
            return
        for companion in new:
            companion.put_on()
        self._watched += new
        self._progress.links.account.evaluations.usual_from(self._progress.completed + 1)
        keep_out_of_frames()


def _ids(module: Any, of: str) -> Iterator[int]:
    """Yields the ids of its "parameters" or "modules". Calls torch's own functions, since a script may define a
    function of that name that needs arguments, returns a list, or raises."""
    with contextlib.suppress(Exception):
        yield from map(id, getattr(sys.modules["torch"].nn.Module, of)(module))


def _may_be_watched(module: Any) -> bool:
    torch = sys.modules["torch"]
    replicated = isinstance(module, (torch.jit.ScriptModule, torch.nn.DataParallel))
    return hasattr(module, CALL) and module.__dict__.get(CALL) is None and not replicated


class Companion(Standing):
    """Replaces the call of an auxiliary model, as `Watched` does for the root."""

    __slots__ = ("_grad_enabled", "_mode")

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._grad_enabled = sys.modules["torch"].is_grad_enabled
        self._mode = bool(module.training)  # its mode in training; in the other mode it is evaluated

    def is_gone(self) -> bool:
        return self._module() is None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        copy = copy_that_calls(sys._getframe(1), module)
        if copy is not None:
            return copy._call_impl(*args, **kwargs)
        call = self._replaced or module._call_impl  # the module is alive, since it is calling us
        p = state.current
        if p is None or p.backward_depth or p.phase_depth or p.thread != get_ident():
            return call(*args, **kwargs)
        graded = self._grad_enabled()
        if graded and forward_runs(p.trace):
            return call(*args, **kwargs)
        return evaluated(p, module.training == self._mode, call, args, kwargs, graded=graded)


not_traced(Companion.__call__)
