"""Watches optimizers that do not come from torch, such as fastai's: classes whose `step` torch's hooks do not see.

A class that derives from torch's without calling its `__init__` is one of them, too. Nothing marks such a class (if
it holds another optimizer, it may step that one only now and then), so it is watched where a framework's adapter or
the user names it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from perfagent.boundary.dynamo import Function
from perfagent.hooks.optimizer_step import after_step, before_step
from perfagent.step.state import state

__all__ = ["is_foreign", "watch_step"]


def watch_step(original: Function) -> Function:
    """Wraps `step` of such a class with what torch's hooks do around its own optimizers."""

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        p = state.current
        if p is None or p.entered:  # an optimizer inside another, or one that is timed from outside already
            return original(self, *args, **kwargs)
        args, kwargs = before_step(self, args, kwargs) or (args, kwargs)
        try:
            result = original(self, *args, **kwargs)
        except BaseException:
            if p.entered == id(self):
                p.entered = 0  # otherwise no later step of it would be seen
            raise
        after_step(self, args, kwargs)
        return result

    return step


def is_foreign(optimizer: Any) -> bool:
    """True if torch's hooks see neither its steps nor those of an optimizer that it holds."""
    own = getattr(optimizer, "__dict__", {})
    if not hasattr(type(optimizer), "step") or hasattr(type(optimizer).step, "hooked") or "step" in own:
        return False
    kind = sys.modules["torch"].optim.Optimizer
    return not any(issubclass(type(held), kind) for held in own.values())
