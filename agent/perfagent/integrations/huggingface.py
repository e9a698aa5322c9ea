"""The Transformers Trainer needs no adapter for its steps, but says only here where a resumed training begins, and ends
by a flag of its own when the run is stopped from afar.

Asked is the beginning of each epoch: it comes before the first step, and later than `on_train_begin`, in which a
callback of the user's may be what attaches.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.integrations import api

if TYPE_CHECKING:
    from perfagent.integrations.functions import Patch

__all__ = ["install"]


def install(framework: ModuleType, patch: Patch) -> None:
    """framework: transformers.trainer_callback."""
    patch(framework.CallbackHandler, "on_epoch_begin", api.before(_begins))
    patch(framework.CallbackHandler, "on_step_end", api.after(_stop_if_due))


def _begins(_handler: object, _arguments: object, state: Any, *_: object, **__: object) -> None:
    """state: the trainer's, which has the steps of the checkpoint."""
    api.resumed_after(int(state.global_step))
    api.stop_due()  # before its first step ends


def _stop_if_due(control: Any, _handler: object, arguments: Any, *_: object, **__: object) -> None:
    """Ends as at `max_steps`, with a checkpoint where the trainer writes any and it may be written."""
    stop = api.stop_due()
    if stop is not None:
        control.should_training_stop = True
        control.should_save = control.should_save or (stop.saves and arguments.save_strategy != "no")
