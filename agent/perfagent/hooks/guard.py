"""The boundary between the agent and the training process: what a hook raises ends here.

A hook that raises is counted, reported once and turned off; training goes on. `failures` shows in `perfagent doctor` and in
the sender's counters. What a signal's handler of the script raises (a time limit by SIGALRM) may come up in the midst of a hook:
that is the script's own, and goes on to it.
"""

from __future__ import annotations

import functools
import logging
import signal
import sys
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

__all__ = ["by_signal", "failed", "failures", "guarded", "keep_out_of_frames", "not_traced", "passed_by", "reset", "untraced"]

logger = logging.getLogger("perfagent")
failures: dict[str, int] = {}
_codes: dict[CodeType, bool] = {}

Hook = TypeVar("Hook", bound=Callable[..., Any])


def failed(name: str, error: Exception) -> None:
    """Counts what went wrong in a hook and tells it; the hook is off from here on. Raises what is not the hook's."""
    if by_signal(error):
        raise error
    failures[name] = failures.get(name, 0) + 1
    told = "".join(traceback.format_exception_only(error)).strip()  # who keeps log records must not keep the script's frames
    logger.warning("perfagent: %s failed and is turned off, training goes on: %s", name, told)


def by_signal(error: BaseException) -> bool:
    """Whether a handler of a signal, which Python calls between any two instructions, has raised this."""
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in handlers:
        trace = trace.tb_next
    return trace is not None


def _code_of(handler: Any) -> CodeType | None:
    handler = getattr(handler, "func", handler)  # functools.partial
    function = handler if hasattr(handler, "__code__") else getattr(handler, "__func__", type(handler).__call__)
    return getattr(function, "__code__", None)


def guarded(hook: Hook) -> Hook:
    """A hook that swallows its exceptions. Those that run in every step do so themselves and call `failed`: a call less."""
    name = f"{hook.__module__}.{hook.__qualname__}"

    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        if failures and name in failures:
            return None
        try:
            return hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - see above: whatever it is, it must not reach the training loop
            failed(name, error)
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


def untraced(function: Hook) -> Hook:
    """Marks a function that a patch calls, and all below it."""
    return not_traced(function, nor_what_it_calls=True)


def passed_by(patch: Hook, original: Callable[..., Any]) -> Hook:
    """A patch in whose place torch.compile traces the original, so that it makes the graphs that it makes without us.

    Where it cannot trace the original either, the graph breaks as it does without us, and the patch is called. For functions that
    can be traced, and for no others: it costs a call. (The mark `_torchdynamo_inline` costs nothing, but it loses a method's
    self, and whoever takes it over with functools.wraps is passed by, too.)
    """
    traced = sys.modules["torch"].compiler.is_dynamo_compiling  # it says False, and the compiler reads True

    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if traced() else patch(*args, **kwargs)

    _codes[call.__code__] = _codes[patch.__code__] = False
    return functools.wraps(original)(call)  # type: ignore[return-value]


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
