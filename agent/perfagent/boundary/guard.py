"""Guards the training process: an exception that a hook raises ends here.

A hook that raises is counted, reported once and turned off; training goes on. `perfagent doctor` and the sender's
counters show `failures`. A signal handler of the script (a time limit by SIGALRM) may raise while a hook runs: that
exception belongs to the script and passes through.
"""

from __future__ import annotations

import functools
import logging
import signal
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

from perfagent.boundary.dynamo import not_traced

__all__ = ["by_signal", "failed", "failures", "guarded", "logger", "reset"]

logger = logging.getLogger("perfagent")
failures: dict[str, int] = {}

Hook = TypeVar("Hook", bound=Callable[..., Any])


def failed(name: str, error: Exception) -> None:
    """Counts and reports an exception of a hook, and turns the hook off. Raises it again if a signal
    handler raised it."""
    if by_signal(error):
        raise error
    failures[name] = failures.get(name, 0) + 1
    text = "".join(traceback.format_exception_only(error)).strip()  # log records must not keep the script's frames
    logger.warning("perfagent: %s failed and is turned off, training goes on: %s", name, text)


def by_signal(error: BaseException) -> bool:
    """True if a signal handler, which Python may call between any two instructions, raised this exception."""
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in handlers:
        trace = trace.tb_next
    return trace is not None


def _handled(record: logging.LogRecord) -> None:
    try:
        _handle(record)
    except Exception as error:
        if by_signal(error):  # raised by the script's own signal handler while we were logging
            raise


_handle = logger.handle
logger.handle = _handled  # type: ignore[method-assign]
"""Swallows exceptions of the script's log handlers and filters: without the agent, they would not have been called."""


def _code_of(handler: Any) -> CodeType | None:
    handler = getattr(handler, "func", handler)  # functools.partial
    function = handler if hasattr(handler, "__code__") else getattr(handler, "__func__", type(handler).__call__)
    return getattr(function, "__code__", None)


def guarded(hook: Hook) -> Hook:
    """Makes a hook swallow its exceptions. Hooks that run in every step call `failed` themselves, which
    saves a call."""
    name = f"{hook.__module__}.{hook.__qualname__}"

    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        if failures and name in failures:
            return None
        try:
            return hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - no exception of a hook may reach the training loop
            failed(name, error)
            return None

    return not_traced(call, nor_what_it_calls=True)  # type: ignore[return-value]


def reset() -> None:
    """Turns every hook on again. Called when a run starts."""
    failures.clear()
