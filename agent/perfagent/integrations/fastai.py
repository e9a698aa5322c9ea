"""fastai: its optimizers are a class of its own. (Those that it wraps, by `OptimWrapper`, are torch's, and need
nothing.)"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from perfagent.hooks.custom_optimizer import watch_step
from perfagent.hooks.optimizer_step import watch_clear

if TYPE_CHECKING:
    from perfagent.integrations import Patch

__all__ = ["install"]


def install(framework: ModuleType, patch: Patch) -> None:
    """framework: fastai.optimizer."""
    patch(framework.Optimizer, "step", watch_step)
    patch(framework.Optimizer, "zero_grad", watch_clear)
