"""Reports from the loop utilities to the run: an event, a number for the chart, and a line on the console.

Without a current run only the console gets it. Nothing here raises."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

from perfagent.session import current

__all__ = ["count", "phase", "tell"]

logger = logging.getLogger("perfagent")


def tell(title: str, text: str, *, level: str = "warning", shown: bool = False) -> None:
    """An alert of the current run and in the log. level: info, warning or critical. shown: on the console, too."""
    line = f"perfagent: {title}: {text}" if text else f"perfagent: {title}"
    loud = "warning" if shown else level
    logger.log({"info": logging.INFO, "critical": logging.ERROR}.get(loud, logging.WARNING), "%s", line)
    run = current()
    if run is not None:
        run.alert(title, text, level)


def count(name: str, value: float) -> None:
    """A number under `recovery/NAME` or `checkpoint/NAME` at the step in progress: a mark on the run's charts."""
    run = current()
    if run is not None:
        run.log({name: value})


def phase(name: str) -> AbstractContextManager[object]:
    """Within, the time is that phase of the current run."""
    run = current()
    return nullcontext() if run is None else run.phase(name)
