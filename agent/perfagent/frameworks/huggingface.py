"""The Transformers Trainer needs no adapter for its steps, but says only here where a resumed training begins.

Asked is the beginning of each epoch: it comes before the first step, and later than `on_train_begin`, in which a
callback of the user's may be what attaches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.boundary.guard import guarded
from perfagent.frameworks.resuming import resumed_after

if TYPE_CHECKING:
    from perfagent.frameworks import Patch

__all__ = ["install"]


def install(framework: ModuleType, patch: Patch) -> None:
    """framework: transformers.trainer_callback."""
    patch(framework.CallbackHandler, "on_epoch_begin", _watch_epoch)


def _watch_epoch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_epoch_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        _begins(*args, **kwargs)
        return original(self, *args, **kwargs)

    return on_epoch_begin


@guarded
def _begins(_arguments: Any, state: Any, *_: Any, **__: Any) -> None:
    """state: the trainer's, which has the steps of the checkpoint."""
    resumed_after(int(state.global_step))
