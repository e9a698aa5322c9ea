"""Times the parts of a model in one step, from which `probes/module_shares.py` computes their shares.

For the training calls of the step, two hooks of all modules stamp where the parts begin and end; they are removed when
the root's call returns. Nothing of ours is on a module, so copies, pickles and torch.compile never meet a hook.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perfagent.boundary.guard import guarded
from perfagent.measure.step_task import StepTask
from perfagent.step.state import StepState, now

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModuleTimes", "Span"]

Span = tuple[Any, Any]
"""Begin and end: nanoseconds or events of a device; None where it could not be marked."""


class ModuleTimes(StepTask):
    """Times the parts of the root model in the next step, as the probe of the root's calls.

    parts: name -> modules that are called for it. spans: of each part; whole: of the root's calls.
    """

    def __init__(self, progress: StepState, parts: Mapping[str, Sequence[nn.Module]]) -> None:
        super().__init__(progress)
        self._names = {module: name for name, modules in parts.items() for module in modules}
        self.over = not parts
        self.spans: dict[str, list[Span]] = {}
        self.whole: list[Span] = []
        self._open: dict[str, Any] = {}  # parts that are being called: when that began

    def _goes_on(self) -> bool:
        p = self._progress
        if self.step or p.probe is not None:
            return False
        self.step, p.probe = p.completed + 1, self
        return True

    def close(self) -> None:
        if self._progress.probe is self:
            self._progress.probe = None
        self.over = True

    def call(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a call of the root model with its parts timed."""
        p = self._progress
        if p.completed >= self.step:
            return call(*args, **kwargs)
        began, modules = now(), sys.modules["torch"].nn.modules.module
        hooks = (
            modules.register_module_forward_pre_hook(self._begin),
            modules.register_module_forward_hook(self._end),
        )
        begin = self._stamp()
        self.cost_ns += now() - began
        try:
            return call(*args, **kwargs)
        finally:
            end, ended = self._stamp(), now()
            self.whole.append((begin, end))
            for hook in hooks:
                hook.remove()
            self._open.clear()
            if not self.over:
                p.probe = self
            self.cost_ns += now() - ended

    @guarded
    def _begin(self, module: nn.Module, _inputs: object) -> None:
        name = self._names.get(module)
        if name is not None and name not in self._open:  # a tree calls itself: its first return ends it
            self._open[name] = self._stamp()

    @guarded
    def _end(self, module: nn.Module, _inputs: object, _output: object) -> None:
        name = self._names.get(module)
        if name in self._open:
            self.spans.setdefault(name, []).append((self._open.pop(name), self._stamp()))

    def _stamp(self) -> Any:
        clock = self._progress.clock
        return now() if clock is None else clock.mark()
