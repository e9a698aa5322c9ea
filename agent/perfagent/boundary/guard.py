"""The boundary between the agent and the training process: what a hook raises ends here.

A hook that raises is counted, reported once and turned off; training goes on. `failures` shows in `perfagent doctor` and in
the sender's counters. What a signal's handler of the script raises (a time limit by SIGALRM) may come up in the midst of a hook:
that is the script's own, and goes on to it.
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

__all__ = ["by_signal", "failed", "failures", "guarded", "reset"]

logger = logging.getLogger("perfagent")
failures: dict[str, int] = {}

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


def reset() -> None:
    """Turns every hook on again; called when a run starts."""
    failures.clear()
