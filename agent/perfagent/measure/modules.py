"""Measures each named part's share of the forward pass, in one step now and then: `module_share/NAME`.

For the training calls of one step, two hooks of all modules stamp where the parts begin and end; they are removed when
the root's call returns. Nothing of ours is on a module, so copies, pickles and torch.compile never meet a hook. Models
that are compiled or replicated over devices are left alone.

The parts are the root's children, and the children of a child that holds nearly all of the model; a list of layers
counts as one part. A part within another has its own share of the whole, so only the shares of one level add up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from perfagent.boundary.guard import guarded
from perfagent.device import reached
from perfagent.measure.compiled import compiled
from perfagent.measure.step_task import StepTask
from perfagent.measure.tensor_storage import numbers_in
from perfagent.step.state import StepState, now

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModuleTimes", "parts_of"]

_MOST_PARTS = 64
_NEARLY_ALL = 0.8
_DEPTH = 2
Span = tuple[Any, Any]
"""Begin and end: nanoseconds or events of a device; None where it could not be marked."""


def parts_of(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Returns name -> modules that are called for it; empty if the model must be left alone."""
    if compiled() or isinstance(model, sys.modules["torch"].nn.DataParallel):
        return {}
    total = _size(model)
    parts: dict[str, list[nn.Module]] = {}
    waiting = list(model.named_children())
    while waiting:
        name, module = waiting.pop(0)
        children = [(f"{name}.{inner}", child) for inner, child in module.named_children()]
        alone = not waiting and not parts and bool(children)  # a wrapper, such as DDP's `module`
        if not _has_forward(module):
            parts[name] = _called_in(module)
            continue
        if not alone:
            parts[name] = [module]
        if alone or (_size(module) > _NEARLY_ALL * total and name.count(".") < _DEPTH):
            waiting = children + waiting
    parts = {name: modules for name, modules in parts.items() if modules}
    return parts if 1 < len(parts) <= _MOST_PARTS else {}


def _has_forward(module: nn.Module) -> bool:
    """True unless the module has no forward, like a list of layers: its layers are called, and may be lists again."""
    return type(module).forward is not sys.modules["torch"].nn.Module.forward or "forward" in vars(module)


def _called_in(module: nn.Module) -> list[nn.Module]:
    parts = [[child] if _has_forward(child) else _called_in(child) for child in module.children()]
    return [part for some in parts for part in some]


def _size(module: nn.Module) -> int:
    return sum(map(numbers_in, module.parameters()))


class ModuleTimes(StepTask):
    """Times the parts of the root model in the next step, as the probe of the root's calls."""

    def __init__(self, progress: StepState, model: nn.Module) -> None:
        super().__init__(progress)
        parts = parts_of(model)
        self._names = {module: name for name, modules in parts.items() for module in modules}
        self.over = not parts
        self._spans: dict[str, list[Span]] = {}
        self._whole: list[Span] = []
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
            self._whole.append((begin, end))
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
            self._spans.setdefault(name, []).append((self._open.pop(name), self._stamp()))

    def _stamp(self) -> Any:
        clock = self._progress.clock
        return now() if clock is None else clock.mark()

    # ---- on the sender's thread

    def ready(self) -> bool:
        """True when all timed calls are over. Never blocks."""
        if not self.over:
            return False
        ends = [pair[1] for pair in self._whole]
        return all(isinstance(end, int) or reached(end) for end in ends)

    def values(self) -> dict[str, float]:
        """Returns `module_share/NAME` of the time in the root's calls; empty if the root was not called in that step."""
        whole, clock = self._seconds(self._whole), self._progress.clock
        seconds = {name: self._seconds(spans) for name, spans in self._spans.items()}
        if clock is not None:
            stamps = [stamp for spans in (self._whole, *self._spans.values()) for span in spans for stamp in span]
            clock.release([stamp for stamp in stamps if stamp is not None and not isinstance(stamp, int)])
        return {f"module_share/{name}": part / whole for name, part in seconds.items()} if whole else {}

    def _seconds(self, spans: list[Span]) -> float:
        clock, total = self._progress.clock, 0.0
        for begin, end in spans:
            if isinstance(begin, int) and isinstance(end, int):
                total += (end - begin) / 1e9
            elif clock is not None and begin is not None and end is not None:
                total += clock.seconds(begin, end) or 0.0
        return total
