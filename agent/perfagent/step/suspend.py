"""Hides steps that are no training (a search, a simulation) from the run that is being recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from perfagent.step.state import state

__all__ = ["unwatched"]


@contextmanager
def unwatched() -> Iterator[None]:
    """Within, the hooks of the current run see nothing: no step, loss or batch is counted."""
    before, state.current = state.current, None
    try:
        yield
    finally:
        if state.current is None and before is not None and not before.links.ended:
            state.current = before
