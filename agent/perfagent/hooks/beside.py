"""Models that the loop calls beside the one whose calls are watched: a teacher, a discriminator, the other tower of two.

Their calls belong to the forward pass: with gradients one begins it, if none runs, and without gradients its own time is added.
(Seldom made calls without gradients are an evaluation, as those of the root are: evaluation.py.)

Which they are is seen in one step, by torch's hooks for all modules: those that no other module has called, that have parameters
of their own and share none with the root. It is looked at again now and then, since a discriminator may join late. Processes
that compile anything are left alone: those hooks would be guarded by each graph.
"""

from __future__ import annotations

import sys
import weakref
from threading import get_ident
from typing import Any

from perfagent.hooks.account import FORWARD, forward_runs
from perfagent.hooks.evaluation import evaluated
from perfagent.hooks.guard import failed, failures, keep_out_of_frames, not_traced, untraced
from perfagent.hooks.progress import Progress, now, state
from perfagent.hooks.standing import CALL, Standing, anything_compiled, copy_that_calls

__all__ = ["Beside"]

_MOST_MODELS = 16
_MOST_CALLS = 5000
"""In the step that is looked at: an evaluation may be in it."""
_NAME = f"{__name__}.Companion"


class Beside:
    """A task between two steps (rootcause/investigator.py): it sees who is called from the end of one to the end of the next.

    Those that are found stay watched until `remove`.
    """

    def __init__(self, p: Progress, root: Any) -> None:
        self._progress, self._root = p, weakref.ref(root)
        self._watched: list[Companion] = []
        self._handles: list[Any] = []
        self._found: list[Any] = []  # weak references
        self._depth = self._calls = 0
        self._off = False

    def at_boundary(self) -> bool:
        if self._handles:
            self._stop()
            self._watch()
            return False
        if self._off or self._root() is None:
            return False
        compiled = anything_compiled()
        if compiled is False:
            self._start()
        return not compiled

    def remove(self) -> None:
        self._off = True
        self._stop()
        for each in self._watched:
            each.take_off()
        self._watched = []

    def _start(self) -> None:
        hooks: Any = sys.modules["torch"].nn.modules.module
        self._found, self._depth, self._calls = [], 0, 0
        self._handles = [hooks.register_module_forward_pre_hook(self._enters)]
        self._handles.append(hooks.register_module_forward_hook(self._leaves, always_call=True))

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _counts(self) -> bool:
        p = self._progress
        return state.current is p and not p.backward_depth and not p.phase_depth and p.thread == get_ident()

    @untraced
    def _enters(self, module: Any, _arguments: Any) -> None:
        if not self._counts():
            return
        if not self._depth and not any(one() is module for one in self._found):
            self._found.append(weakref.ref(module))
        self._depth += 1
        self._calls += 1
        if self._calls >= _MOST_CALLS:
            self._stop()

    @untraced
    def _leaves(self, _module: Any, _arguments: Any, _output: Any) -> None:
        if self._depth and self._counts():
            self._depth -= 1

    def _watch(self) -> None:
        root: Any = self._root()
        found, self._found = [module for one in self._found if (module := one()) is not None], []
        if root is None or len(found) > _MOST_MODELS:
            return
        own = {id(parameter) for parameter in root.parameters()}
        inner = {id(part) for module in found for part in module.modules() if part is not module}
        for module in found:
            mine = {id(parameter) for parameter in module.parameters()}
            if mine and not mine & own and id(module) not in inner and _may_be_watched(module):
                self._watched.append(Companion(module))
                self._watched[-1].put_on()
        if self._watched:
            self._progress.account.evaluations.usual_from(self._progress.completed + 1)
            keep_out_of_frames()


def _may_be_watched(module: Any) -> bool:
    torch = sys.modules["torch"]
    replicated = isinstance(module, (torch.jit.ScriptModule, torch.nn.DataParallel))
    return hasattr(module, CALL) and module.__dict__.get(CALL) is None and not replicated


class Companion(Standing):
    """Stands in the call of such a model, as `Watched` stands in that of a root."""

    __slots__ = ("_grad_enabled",)

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._grad_enabled = sys.modules["torch"].is_grad_enabled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        copy = copy_that_calls(sys._getframe(1), module)
        if copy is not None:
            return copy._call_impl(*args, **kwargs)
        call = self._replaced or module._call_impl  # it lives: it is calling us
        p = state.current
        if p is None or p.backward_depth or p.phase_depth or p.thread != get_ident() or _NAME in failures:
            return call(*args, **kwargs)
        if not self._grad_enabled():
            return evaluated(p, True, call, args, kwargs)
        try:
            if not forward_runs(p.trace):
                p.opened = True
                p.trace.extend((now(), None if p.clock is None else p.clock.mark(), None, None, FORWARD))
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            failed(_NAME, error)
        return call(*args, **kwargs)


not_traced(Companion.__call__)
