"""The boundary between the agent and the training process: here, and nowhere else, the agent swallows an exception.

A hook that raises is counted, reported once and turned off; training goes on. `failures` shows in `perfagent doctor` and in
the sender's counters.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["failures", "guarded", "reset"]

logger = logging.getLogger("perfagent")
failures: dict[str, int] = {}

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

    return call  # type: ignore[return-value]


def reset() -> None:
    """Turns every hook on again; called when a run starts."""
    failures.clear()
