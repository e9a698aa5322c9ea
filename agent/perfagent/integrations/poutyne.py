"""poutyne: with `batches_per_step` it backpropagates the sum over each batch and divides the gradients of all at the
end.

So the losses are divided, too: then they are what the optimizer minimizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.integrations import api

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
        api.divide_losses(examples_in_step)
        return original(self, examples_in_step)

    return _adjust_step_size
