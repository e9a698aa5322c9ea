"""torch.distributed.pipelining: a schedule backpropagates the loss of each micro-batch as it is, and divides the
gradients by their number afterwards. What it minimizes is the mean of those losses."""

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
    """framework: torch.distributed.pipelining.stage."""
    if hasattr(framework._PipelineStageBase, "scale_grads"):  # torch 2.4 divides no gradients
        patch(framework._PipelineStageBase, "scale_grads", _watch_scale_grads)


def _watch_scale_grads(original: Callable[..., Any]) -> Callable[..., Any]:
    """Called by every schedule once its backward passes are over, unless it was made with `scale_grads=False`."""

    @functools.wraps(original)
    def scale_grads(self: Any, grad_scale_factor: int) -> Any:
        if grad_scale_factor != 1:
            api.divides_later()
        return original(self, grad_scale_factor)

    return scale_grads
