"""Adds up the forward pass of a step from the calls of models before backward starts.

If the root returned the loss, its call is the forward pass. If it returned something else, the pass lasts until
backward starts, since the script computes the loss in between. Calls of other models before the root's call, or instead
of it, add their own time; if the root is not called, so does the time between the last of them and backward. Nothing
counts twice: waits and phases within a call are taken off the call, and a call within a wait or phase is not counted.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ForwardPass", "Size"]

Size = tuple[int | None, int | None, bool]
"""Samples, tokens, and whether the tokens count only for a model with an embedding."""


class ForwardPass:
    """Calls that wait for their backward pass. Times in ns; events: of the device clock. ignored: calls in evaluation
    mode that have not returned."""

    __slots__ = ("_aside", "_began", "_calls", "_event", "_pairs", "_size", "_spent", "_till", "_waits", "ignored")

    def __init__(self) -> None:
        self.ignored = 0
        self._aside: list[tuple[int, int, int]] = []  # calls of other models that count: began, ended, ns
        self._waits: list[tuple[int, int]] = []  # began, ns
        self.reset()

    def reset(self) -> None:
        self._began = self._spent = self._calls = self._till = self.ignored = 0
        self._event: Any = None
        self._pairs: list[tuple[Any, Any]] | None = None
        self._size: Size | None = None
        if self._aside:
            self._aside = []
        if self._waits:
            self._waits = []

    def begin(self, at: int, event: Any, size: Size | None) -> None:
        """The root is called."""
        if not self._began:
            self._began, self._event = at, event
        self._calls += 1
        if self._size is None or (size is not None and _numbers(size) > _numbers(self._size)):
            self._size = size
        self._till = 0

    def begin_on_device(self, at: int, event: Any) -> None:
        """Another model is called, in device time."""
        if not self._began:
            self._began, self._event = at, event

    def beside(self, at: int, ended: int, *, open_end: bool) -> None:
        """Another model was called. open_end: with gradients, so the pass may last until backward."""
        if self._began:
            return
        spent = ended - at
        for began, wait in reversed(self._waits):
            if began < at:
                break
            spent -= wait
        self._aside.append((at, ended, spent))
        self._spent += spent
        if open_end:
            self._till = ended

    @property
    def runs(self) -> bool:
        return bool(self._began)

    def pause(self, at: int, ended: int) -> None:
        """The loop did something else: fetched a batch, cleared gradients, or spent time in another phase."""
        while self._aside and at <= self._aside[-1][0] and self._aside[-1][1] <= ended:
            self._spent -= self._aside.pop()[2]
        self._waits.append((at, ended - at))
        if self._began:
            self._began += ended - at
        elif self._till:
            self._till += ended - at

    def returned(self, at: int, event: Any, *, holds_loss: bool) -> None:
        if self.ignored:
            self.ignored -= 1
        elif holds_loss and self._began:
            self._add(at, event)
            self._began = 0

    def _add(self, at: int, event: Any) -> None:
        self._spent += at - self._began
        if event is not None:
            self._pairs = [*(self._pairs or ()), (self._event, event)]

    def end(self, at: int, event: Any) -> tuple[int, Size | None, int, list[tuple[Any, Any]]]:
        """Ends the pass when backward starts. Returns the ns of its forward passes, the size of the largest batch (not
        that of a few boundary points next to the interior; both views of a pair), the number of the root's calls, and
        pairs of events."""
        if self._began:
            self._add(at, event)
        elif self._till:
            self._spent += at - self._till
        ended = self._spent, self._size, self._calls, self._pairs or []
        self.reset()
        return ended


def _numbers(size: Size) -> tuple[int, int]:
    """Returns samples and tokens for comparison."""
    return size[0] or 0, size[1] or 0
