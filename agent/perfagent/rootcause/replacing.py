"""A function of somebody else's in whose place ours stands for a while: it is told of each call, and calls the original."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perfagent.hooks.guard import not_traced

__all__ = ["replace"]


def replace(owner: Any, name: str, first: Callable[..., Any]) -> Callable[[], None]:
    """first: is called before the original, with its arguments, and must not raise. Gives what puts the original back, unless
    somebody else stands there by then."""
    original = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        first(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, not_traced(watched))

    def undo() -> None:
        if getattr(owner, name) is watched:
            setattr(owner, name, original)

    return undo
