"""Lightning: the forward pass is `training_step`, which the trainer calls by that name and not through the module.

Where a strategy wraps the module (DDP, DeepSpeed), it calls the wrapper, which is watched like any model. With manual
optimization the forward pass of a training step lasts until its first backward pass; what comes between later ones is in `other`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.hooks.forward import Watched
from perfagent.hooks.guard import keep_out_of_frames
from perfagent.hooks.progress import state

if TYPE_CHECKING:
    from perfagent.frameworks import Patch

__all__ = ["install"]


def install(framework: ModuleType, patch: Patch) -> None:
    """framework: lightning.pytorch.strategies.strategy, or the same under the package's older name."""
    patch(framework.Strategy, "training_step", _watch_training_step)
    keep_out_of_frames()


def _watch_training_step(original: Callable[..., Any]) -> Callable[..., Any]:
    calls: weakref.WeakKeyDictionary[Any, Watched] = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        if state.current is None or self.model is not module:
            return original(self, *args, **kwargs)
        watched = calls.get(self)
        if watched is None:
            strategy = weakref.ref(self)
            watched = calls[self] = Watched(module, lambda *given, **named: original(strategy(), *given, **named))
        return watched(*args, **kwargs)

    return training_step
