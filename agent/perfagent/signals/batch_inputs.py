"""Records when the shape of the input changed. If the number of tokens is unknown, the number of samples alone does not show
how much a step computes. The sizes themselves are part of each step's trace."""

from __future__ import annotations

from collections import deque
from typing import Any

from perfagent.step.state import state

__all__ = ["Inputs", "Shape", "inputs"]

Shape = tuple[int, ...]
_MOST_CHANGES = 1024


class Inputs:
    """Records when the shape of the input changed, for batches of training and evaluation alike.

    latest: the shape of the newest batch, the very object that its reader keeps; None if it does not show how large the
        input is.
    changes: (steps completed then, shape of one sample from there on), the newest few of one run, until they are taken.
    """

    __slots__ = ("_completed", "changes", "latest")

    def __init__(self) -> None:
        self.latest: Any = None
        self.changes: deque[tuple[int, Shape | None]] = deque(maxlen=_MOST_CHANGES)
        self._completed = 0

    def turn_to(self, shape: Any) -> None:
        """Records a new shape. On the training thread."""
        self.latest = shape
        completed = state.current.completed if state.current is not None else 0
        if completed < self._completed:  # a new run has begun
            self.changes = deque(maxlen=_MOST_CHANGES)
        self._completed = completed
        self.changes.append((completed, None if shape is None else tuple(shape[1:])))


inputs = Inputs()
