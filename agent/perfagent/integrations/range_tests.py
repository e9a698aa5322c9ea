"""Searches for a learning rate or a batch size that a framework makes before it trains: they step the optimizer, and
put everything back afterward. Their steps are not the training's, and their loss diverges on purpose."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from perfagent.hooks.checkpoint_saves import Patch, replace_when_imported
from perfagent.step.suspend import unwatched

__all__ = ["install"]

_LIGHTNING = {
    "callbacks.lr_finder": ("LearningRateFinder.lr_find",),
    "callbacks.batch_size_finder": ("BatchSizeFinder.scale_batch_size",),
}
RANGE_TESTS = {
    **{
        f"{package}.{module}": names
        for package in ("lightning.pytorch", "pytorch_lightning")
        for module, names in _LIGHTNING.items()
    },
    "fastai.callback.schedule": ("Learner.lr_find",),
    "torch_lr_finder.lr_finder": ("LRFinder.range_test",),
}


def install(patch: Patch, when_imported: Callable[[str, Callable[[], None]], None]) -> None:
    """Hides each search from the run, when its module is imported."""
    replace_when_imported(RANGE_TESTS, _hide, patch, when_imported)


def _hide(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def search(*args: Any, **kwargs: Any) -> Any:
        with unwatched():
            return original(*args, **kwargs)

    return search
