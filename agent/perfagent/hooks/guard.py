"""The boundary between the agent and the training process: here, and nowhere else, the agent swallows an exception.

A hook that raises is counted, reported once and turned off; training goes on. `failures` shows in `perfagent doctor` and in
the sender's counters.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

__all__ = ["failures", "guarded", "keep_out_of_frames", "not_traced", "reset"]

logger = logging.getLogger("perfagent")
failures: dict[str, int] = {}
_codes: dict[CodeType, bool] = {}

Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(hook: Hook) -> Hook:
    """The only place where the agent swallows an exception: it counts it, logs it once, and turns that hook off."""
    name = f"{hook.__module__}.{hook.__qualname__}"

    @functools.wraps(hook)
    def call(*args: Any) -> Any:
        if failures and name in failures:
            return None
        try:
            return hook(*args)
        except Exception as error:  # noqa: BLE001 - see above: whatever it is, it must not reach the training loop
            failures[name] = failures.get(name, 0) + 1
            logger.warning("perfagent: %s failed and is turned off, training goes on: %s: %s", name, type(error).__name__, error)
            return None

    return not_traced(call, nor_what_it_calls=True)  # type: ignore[return-value]


def not_traced(function: Hook, *, nor_what_it_calls: bool = False) -> Hook:
    """Marks a function of ours as one that torch.compile must call and not trace, as torch.compiler.disable would.

    nor_what_it_calls: False for a patch, since below it lies what it patched. (That decorator imports torch._dynamo, which takes
    a second that most scripts do not need.)
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "a hook of perfagent"  # type: ignore[attr-defined]
    _codes[function.__code__] = nor_what_it_calls
    return function


def keep_out_of_frames() -> None:
    """The same for calls that torch.compile meets as frames of their own. Needs torch."""
    frames: Any = getattr(sys.modules["torch"]._C._dynamo, "eval_frame", None)
    strategy, action = getattr(frames, "_FrameExecStrategy", None), getattr(frames, "_FrameAction", None)
    while _codes and strategy is not None and action is not None:
        code, deep = _codes.popitem()
        frames.set_code_exec_strategy(code, strategy(action.SKIP, action.SKIP if deep else action.DEFAULT))


def reset() -> None:
    """Turns every hook on again; called when a run starts."""
    failures.clear()
