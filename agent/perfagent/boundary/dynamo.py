"""Marks our functions so that torch.compile does not trace them: it makes the same graphs as without the agent. And knows
what it has compiled."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, TypeVar

__all__ = ["Function", "compiled", "ignore_backends", "keep_out_of_frames", "not_traced", "passed_by", "untraced"]

_codes: dict[CodeType, bool] = {}
_ignored: set[int] = set()
"""ids of backends of the compiler: inductor has one backend per function."""

Function = Callable[..., Any]
Hook = TypeVar("Hook", bound=Function)


def not_traced(function: Hook, *, nor_what_it_calls: bool = False) -> Hook:
    """Marks one of our functions as one that torch.compile must call and not trace, as torch.compiler.disable would.

    nor_what_it_calls: False for a patch, since it calls the function that it patched. (That decorator imports
    torch._dynamo, which takes a second that most scripts do not need.)
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "a hook of perfagent"  # type: ignore[attr-defined]
    _codes[function.__code__] = nor_what_it_calls
    return function


def untraced(function: Hook) -> Hook:
    """Marks a function that a patch calls, and all that it calls."""
    return not_traced(function, nor_what_it_calls=True)


def passed_by(patch: Hook, original: Callable[..., Any]) -> Hook:
    """Wraps a patch so that torch.compile traces the original in its place, and makes the same graphs as
    without the agent.

    Where torch.compile cannot trace the original either, the graph breaks as it does without the agent, and the patch
    is called. Use it only for functions that can be traced: it costs one call. (The mark `_torchdynamo_inline` costs
    nothing, but it loses a method's self, and a function that takes the mark over by functools.wraps is bypassed, too.)
    """
    traced = sys.modules["torch"].compiler.is_dynamo_compiling  # False at run time; the compiler reads it as True

    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if traced() else patch(*args, **kwargs)

    _codes[call.__code__] = _codes[patch.__code__] = False
    return functools.wraps(original)(call)  # type: ignore[return-value]


def keep_out_of_frames() -> None:
    """Marks the same functions for the calls that torch.compile meets as frames of their own. Without torch does nothing."""
    frames: Any = getattr(getattr(getattr(sys.modules.get("torch"), "_C", None), "_dynamo", None), "eval_frame", None)
    strategy, action = getattr(frames, "_FrameExecStrategy", None), getattr(frames, "_FrameAction", None)
    while _codes and strategy is not None and action is not None:
        code, deep = _codes.popitem()
        frames.set_code_exec_strategy(code, strategy(action.SKIP, action.SKIP if deep else action.DEFAULT))
    skip = getattr(frames, "skip_code", None)
    while _codes and skip is not None:  # older versions, such as torch 2.4, know no difference in depth
        skip(_codes.popitem()[0])


def compiled() -> bool:
    """True if this process used torch.compile for anything that may call a module."""
    used = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    asked = {id(backend) for backend in used.values() if backend is not None}  # disabling torch.compile leaves None
    return not asked <= _ignored


def ignore_backends(backends: Iterable[object]) -> None:
    """Their functions take tensors only, and call no module."""
    _ignored.update(map(id, backends))
