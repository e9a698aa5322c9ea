"""What the measurements of a step have in common that begin and end between two steps (causes/watch.py)."""

from __future__ import annotations

from perfagent.step.state import StepState, now

__all__ = ["StepTask"]


class StepTask:
    """step: the measured step; 0 if nothing was measured. over: it has ended. cost_ns: of the training thread."""

    def __init__(self, progress: StepState) -> None:
        self._progress = progress
        self.step = 0
        self.over = False
        self.cost_ns = 0

    def at_boundary(self) -> bool:
        """Called at the end of each step. True while it goes on."""
        began = now()
        try:
            if not self.over and self._goes_on():
                return True
            self.close()
            return False
        finally:
            self.cost_ns += now() - began

    def _goes_on(self) -> bool:
        """Begins, or measures further. False at the end, and if it cannot begin."""
        raise NotImplementedError

    def close(self) -> None:
        """Restores everything. On the training thread."""
        self.over = True
