"""fastai: its optimizers are a class of its own. (Those that it wraps, by `OptimWrapper`, are torch's, and need
nothing.)"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from perfagent.integrations import api

if TYPE_CHECKING:
    from perfagent.integrations import Patch

__all__ = ["install"]


def install(framework: ModuleType, patch: Patch) -> None:
    """framework: fastai.optimizer."""
    patch(framework.Optimizer, "step", api.watch_optimizer_step)
    patch(framework.Optimizer, "zero_grad", api.watch_clear)
