"""poutyne: with `batches_per_step` it backpropagates the sum over each batch and divides the gradients of all at the
end.

So do the losses here become what the optimizer minimizes. One that is still on a device cannot be divided, and is not
told.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.boundary.guard import guarded
from perfagent.step.state import Progress, state
from perfagent.step.trace import BACKWARD, FIELDS, OPTIMIZER_END

if TYPE_CHECKING:
    from perfagent.integrations import Patch

__all__ = ["install"]


def install(framework: ModuleType, patch: Patch) -> None:
    """framework: poutyne.framework.model."""
    if hasattr(framework.Model, "_adjust_step_size"):
        patch(framework.Model, "_adjust_step_size", _watch_division)


def _watch_division(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _adjust_step_size(self: Any, examples_in_step: Any) -> Any:
        p = state.current
        if p is not None and p.thread == get_ident():
            _divide(p, examples_in_step)
        return original(self, examples_in_step)

    return _adjust_step_size


@guarded
def _divide(p: Progress, examples: int) -> None:
    trace, end = p.trace, len(p.trace)
    while end and trace[end - 1] != OPTIMIZER_END:
        begin = end - FIELDS[trace[end - 1]]
        if trace[end - 1] == BACKWARD:
            value = trace[begin + 2]
            trace[begin + 2 : begin + 4] = value / examples if isinstance(value, float) else None, True
        end = begin
