"""Steps that are no training: a search, a simulation. The run that is being recorded does not hear of them."""

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
        if state.current is None:
            state.current = before
