"""Provides the logger "perfagent", through which the agent reports to the user.

Its handlers and filters belong to the script. Their exceptions end here: without the agent nothing would have been
logged, and nothing raised.
"""

from __future__ import annotations

import logging

from perfagent.boundary.guard import by_signal

__all__ = ["logger"]


def _handled(record: logging.LogRecord) -> None:
    try:
        _handle(record)
    except Exception as error:
        if by_signal(error):  # raised by the script's own signal handler while we were logging
            raise


logger = logging.getLogger("perfagent")
_handle = logger.handle
logger.handle = _handled  # type: ignore[method-assign]
