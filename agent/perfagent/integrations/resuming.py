"""A trainer that goes on from its own checkpoint: its next step is the one after those that the checkpoint has made.

Counted from 1 again, the steps would not be the trainer's own, and in a run that has an id by hand they would hide
those that were made before the checkpoint.
"""

from __future__ import annotations

from perfagent.boundary.guard import guarded
from perfagent.step.state import state

__all__ = ["resumed_after"]


@guarded
def resumed_after(steps: int) -> None:
    """The checkpoint has made so many steps. A run that has steps goes on counting, and a `start_step` of the script's
    stands."""
    p = state.current
    if p is not None and p.last is None and steps > 0 and p.on_resumed is not None:
        p.on_resumed(steps + 1)
