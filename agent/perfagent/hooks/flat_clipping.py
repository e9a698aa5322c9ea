"""Watches clipping with FSDP1, whose wrapper has its own method for it and whose gradients are shards.

The norm of that method covers all gradients of all ranks. torch's own functions, called with those shards, return a
norm of this rank's shards only, which means nothing (grad_clipping.py leaves it out).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

from perfagent.boundary.guard import guarded
from perfagent.device import take
from perfagent.hooks.grad_clipping import Clip, about_to_clip
from perfagent.step.state import Progress, state

__all__ = ["install"]

_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"


def install(patch: Callable[..., None], when_imported: Callable[[str, Callable[[], None]], None]) -> None:
    """Watches the method once the wrapper's module is imported."""

    def loaded() -> None:
        patch(sys.modules[_MODULE].FullyShardedDataParallel, "clip_grad_norm_", _watch)

    when_imported(_MODULE, loaded)


def _watch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip_grad_norm_(model: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        p = state.current
        if p is None or p.thread != get_ident():
            return original(model, max_norm, norm_type)
        clip = _begin(p, model)
        total = original(model, max_norm, norm_type)
        if clip is not None and norm_type == 2.0:
            _tell(clip, total)
        return total

    return clip_grad_norm_


@guarded
def _begin(p: Progress, model: Any) -> Clip | None:
    """Registers the clipping. (The method itself also walks all parameters, in Python and more than once.)"""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return about_to_clip(p, gradients)


@guarded
def _tell(clip: Clip, total: Any) -> None:
    clip.norm, clip.whole = take(total), True
