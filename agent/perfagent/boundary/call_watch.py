"""Functions that take the place of one of another library: ours sees each call, and calls the original."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from perfagent.boundary.dynamo import Function, not_traced
from perfagent.boundary.guard import guarded

__all__ = ["Watch", "after", "before", "replace"]

Watch = Callable[[Function], Function]
"""Returns what takes the place of a function."""

_over: WeakKeyDictionary[Function, Function] = WeakKeyDictionary()
"""Our ended patches that a later patch of ours still covers -> the function that each of them replaced."""


def before(note: Callable[..., object]) -> Watch:
    """`note` gets the arguments of each call, before it. What goes wrong in it ends there."""
    guarded_note = guarded(note)

    def watch(original: Function) -> Function:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            guarded_note(*args, **kwargs)
            return original(*args, **kwargs)

        return call

    return watch


def after(note: Callable[..., object]) -> Watch:
    """`note` gets the result of each call, and its arguments. What goes wrong in it ends there."""
    guarded_note = guarded(note)

    def watch(original: Function) -> Function:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            guarded_note(result, *args, **kwargs)
            return result

        return call

    return watch


def replace(owner: Any, name: str, first: Function, last: Callable[[], Any] | None = None) -> Callable[[], None]:
    """Patches `owner.name` and returns a function that restores the original, unless somebody else has
    patched it by then.

    first: called before the original, with its arguments; must not raise. last: called after the original,
    however that ends.
    """
    original, is_inherited = getattr(owner, name), name not in vars(owner)
    over = False

    @functools.wraps(original)  # torch.jit.script reads the source of the functions in a class
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not over:  # a later patch, ours or the script's, may still call this one
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
        if is_inherited and back is original:
            delattr(owner, name)
        else:
            setattr(owner, name, back)

    return undo
