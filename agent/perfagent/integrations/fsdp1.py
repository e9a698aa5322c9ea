"""FSDP1: its wrapper has its own method for clipping, and its gradients are shards.

The norm of that method covers all gradients of all ranks. torch's own functions, called with those shards, return a
norm of this rank's shards only, which means nothing (hooks/grad_clipping.py leaves it out).
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
    """framework: torch.distributed.fsdp.fully_sharded_data_parallel."""
    patch(framework.FullyShardedDataParallel, "clip_grad_norm_", _watch)


def _watch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip_grad_norm_(model: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        clip = api.begin_clipping(model.parameters()) if api.is_training_thread() else None
        total = original(model, max_norm, norm_type)
        if norm_type == 2.0:
            api.end_clipping(clip, total)
        return total

    return clip_grad_norm_
