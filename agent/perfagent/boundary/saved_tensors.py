"""Whether a tensor that autograd keeps for its backward pass was packed by a hook. To read it would run that hook:
activation checkpointing would run the model again.

In torch 2.4 and 2.6 a kept tensor does not say so. There, all count as packed once a script has used such hooks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from perfagent.boundary.dynamo import Function

__all__ = ["forget", "install", "is_packed"]

_used = False


def install(patch: Callable[..., None]) -> None:
    """Needs torch."""
    torch = sys.modules["torch"]
    if not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"):
        patch(torch.autograd.graph.saved_tensors_hooks, "__enter__", _watch)


def _watch(original: Function) -> Function:
    @functools.wraps(original)
    def enter(self: Any) -> Any:
        global _used
        _used = True
        return original(self)

    return enter


def forget() -> None:
    """No graph of before is read any more."""
    global _used
    _used = False


def is_packed(kept: Any) -> bool:
    """kept: what `node._raw_saved_NAME` holds."""
    if kept is None:
        return False
    hook = getattr(kept, "unpack_hook", kept)
    return _used if hook is kept else hook is not None
