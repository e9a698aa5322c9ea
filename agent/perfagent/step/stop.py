"""Ends a training from afar: after a step that rank 0 has named, on all ranks at the end of the same one.

Rank 0 names a step that is still to come, the others learn it over the server, and nobody waits: until that step a
training that may be stopped does what any other does. Who trains ends it in its own way: a trainer by its own flag, a
loop that reads `run.should_stop` by itself, any other by `Stopped`, which the optimizer's step raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfagent.errors import Stopped
from perfagent.step.state import state

if TYPE_CHECKING:
    from perfagent.step.state import StepState

__all__ = ["Stop", "claim"]


class Stop:
    """The stop of one run. raises: the script allows that its loop is left by an exception (`attach(stoppable=True)`).
    claimed: a trainer or `perfagent.loop` ends it by a flag of its own. at: the step after which it ends, None while nobody
    asked; saves: a checkpoint may be written then (not after a NaN loss); why: who asked, and for what."""

    def __init__(self, progress: StepState) -> None:
        self._progress = progress
        self.raises = self.claimed = self._owned = False
        self._read_at = -1
        self.at: int | None = None
        self.saves = True
        self.why = ""

    @property
    def allowed(self) -> bool:
        return self.raises or self._owned or self._read_at >= 0

    @property
    def due(self) -> bool:
        return self.at is not None and self._progress.completed >= self.at

    def read(self) -> bool:
        """What `run.should_stop` says: a loop that reads it ends by itself."""
        self._read_at = self._progress.completed
        return self.due

    def claim(self, *, owned: bool) -> bool:
        """Whether to end now. owned: the loop is perfagent's, and so may always be stopped."""
        self.claimed = True
        self._owned = self._owned or owned
        return self.due

    def at_boundary(self) -> bool:
        """After a step, on the training thread. Raises Stopped where nobody else ends the training."""
        if not self.due:
            return True
        assert self.at is not None
        reads = self._read_at >= self.at - 1 and self._progress.completed == self.at
        if self.raises and not self.claimed and not reads:
            raise Stopped(f"perfagent: stopped after step {self._progress.completed:,}: {self.why}")
        return not self.claimed


def claim(*, owned: bool = False) -> Stop | None:
    """Called by a trainer at the end of each step. Returns the stop that it has to obey now, by a flag of its own."""
    p = state.current
    stop: Stop | None = None if p is None else p.links.investigator.stop
    return stop if stop is not None and stop.claim(owned=owned) else None
