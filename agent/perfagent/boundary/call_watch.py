"""Replaces a function of somebody else's for a while: ours sees each call, and calls the original."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from perfagent.boundary.dynamo import not_traced

__all__ = ["replace"]

_over: WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = WeakKeyDictionary()
"""What stood there until another one of ours, which had begun meanwhile, covered it; and what it replaced."""


def replace(owner: Any, name: str, first: Callable[..., Any], last: Callable[[], Any] | None = None) -> Callable[[], None]:
    """first: is called before the original, with its arguments, and must not raise; last: after it, however it ends. Gives what
    puts the original back, unless somebody else stands there by then."""
    original = getattr(owner, name)
    over = False

    @functools.wraps(original)  # torch.jit.script reads the source of what it finds in a class
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not over:  # another one of ours that began later may hold on to it, or a patch of the script's
            first(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            if last is not None:
                last()

    setattr(owner, name, not_traced(watched))

    def undo() -> None:
        nonlocal over
        over = True
        if getattr(owner, name) is not watched:
            _over[watched] = original
            return
        back = original
        while back in _over:
            back = _over[back]
        setattr(owner, name, back)

    return undo
