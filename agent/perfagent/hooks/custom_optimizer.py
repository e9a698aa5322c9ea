"""Optimizers that are none of torch's: classes of their own with a `step`, such as fastai's, which torch's hooks know nothing of.

A class that derives from torch's without calling its `__init__` is one, too. What such a class is cannot be told from outside
(one that holds another optimizer may step it now and then only), so it is watched where a framework's adapter or the user
names it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from perfagent.boundary.dynamo import keep_out_of_frames, not_traced
from perfagent.hooks.optimizer_step import after_step, before_step
from perfagent.step.state import state

__all__ = ["is_foreign", "watch_foreign", "watch_step"]


def watch_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """`step` of such a class, with what torch's hooks do round that of an optimizer of its own."""

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        p = state.current
        if p is None or p.entered:  # an optimizer inside an optimizer, or one that is timed from outside already
            return original(self, *args, **kwargs)
        args, kwargs = before_step(self, args, kwargs) or (args, kwargs)
        try:
            result = original(self, *args, **kwargs)
        except BaseException:
            if p.entered == id(self):
                p.entered = 0  # else none of its later steps would be seen
            raise
        after_step(self, args, kwargs)
        return result

    return step


def is_foreign(optimizer: Any) -> bool:
    """Whether torch's hooks will not see its steps, nor those of an optimizer that it holds."""
    own = getattr(optimizer, "__dict__", {})
    if not hasattr(type(optimizer), "step") or hasattr(type(optimizer).step, "hooked") or "step" in own:
        return False
    kind = sys.modules["torch"].optim.Optimizer
    return not any(issubclass(type(held), kind) for held in own.values())


def watch_foreign(optimizer: Any) -> Callable[[], None]:
    """Watches the steps of one that the user named, and of others of its class; the answer undoes that."""
    owner = type(optimizer)
    inherited = "step" not in owner.__dict__
    original = owner.step
    patch = not_traced(watch_step(original))
    owner.step = patch
    keep_out_of_frames()
    where = weakref.ref(owner)

    def undo() -> None:
        patched: Any = where()
        if patched is None or patched.__dict__.get("step") is not patch:
            return  # gone, or patched on top of us: ours stays below, and passes through
        if inherited:
            del patched.step
        else:
            patched.step = original

    return undo
