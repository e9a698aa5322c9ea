"""Contains the errors of an investigation.

Unlike a hook that fails (boundary/guard.py), a failing investigation turns off only itself: timing and loss go on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from perfagent.boundary.dynamo import not_traced

__all__ = ["contained", "problems"]

logger = logging.getLogger("perfagent")
problems: dict[str, str] = {}
"""What failed in this process, by function: such a function does nothing from there on."""

Look = TypeVar("Look", bound=Callable[..., Any])


def contained(look: Look) -> Look:
    """A function that the training thread calls and whose exceptions must not reach it; None is its answer then."""
    name = f"{look.__module__}.{look.__qualname__}"

    @functools.wraps(look)
    def call(*args: Any) -> Any:
        if problems and name in problems:
            return None
        try:
            return look(*args)
        except Exception as error:  # noqa: BLE001 - see above
            problems[name] = f"{type(error).__name__}: {error}"
            logger.warning("perfagent: %s failed and is turned off, training goes on: %s", name, problems[name])
            return None

    return not_traced(call, nor_what_it_calls=True)  # type: ignore[return-value]
