"""Lightning: the forward pass is `training_step`, which the trainer calls by that name and not through the module.

Where a strategy wraps the module (DDP, DeepSpeed), it calls the wrapper, which is watched like any model. With manual
optimization the forward pass of a training step lasts until its first backward pass; what comes between later ones is
in `other`.

A training that goes on from a checkpoint (`ckpt_path`) counts on from there. One that is stopped from afar ends by
`trainer.should_stop`.
"""

from __future__ import annotations

import functools
import weakref
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.integrations import api

if TYPE_CHECKING:
    from perfagent.integrations.functions import Patch

__all__ = ["install"]


def install(framework: ModuleType, patch: Patch) -> None:
    """framework: lightning.pytorch.strategies.strategy, or the same under the package's older name."""
    patch(framework.Strategy, "training_step", _watch_training_step)
    patch(framework.Strategy, "on_train_start", api.after(_starts))
    patch(framework.Strategy, "optimizer_step", api.after(_stop_if_due))
    patch(framework.Strategy, "on_train_end", api.before(_save_at_stop))


def _watch_training_step(original: api.Function) -> api.Function:
    calls: weakref.WeakKeyDictionary[Any, api.WatchedModel] = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        if self.model is not module:
            return original(self, *args, **kwargs)
        watched = calls.get(self)
        if watched is None:
            strategy = weakref.ref(self)
            watched = calls[self] = api.WatchedModel(
                module, lambda *given, **named: original(strategy(), *given, **named)
            )
        return watched(*args, **kwargs)

    return training_step


def _stop_if_due(_result: object, strategy: Any, *_: object, **__: object) -> None:
    if api.stop_due() is not None:
        strategy.lightning_module.trainer.should_stop = True


def _save_at_stop(strategy: Any, *_: object, **__: object) -> None:
    """Where the trainer keeps checkpoints, under a name of its own: none of them makes room for it, none is the best."""
    trainer, stop = strategy.lightning_module.trainer, api.stop_due()
    if stop is not None and stop.saves and trainer.checkpoint_callback is not None:
        folder = trainer.checkpoint_callback.dirpath or trainer.default_root_dir
        trainer.save_checkpoint(Path(folder, f"stopped-step={trainer.global_step}.ckpt"))


def _starts(_result: object, strategy: Any, *_: object, **__: object) -> None:
    """Called once a training, when all of a checkpoint is restored. Lightning adds up the steps of all optimizers, of
    which one may step more often than another (a GAN): the main one's own count is that of the run."""
    api.stop_due()
    optimizers, all_steps = strategy.optimizers, strategy.lightning_module.trainer.global_step
    own = api.own_count(max(optimizers, key=api.numbers_trained)) if len(optimizers) > 1 else 0
    api.resumed_after(own or all_steps // max(1, len(optimizers)))
