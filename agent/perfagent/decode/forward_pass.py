"""The forward pass of a step, put together from calls of models until backward starts.

Where the root returned the loss, its call is the forward pass; where it returned something else, the pass lasts until backward
starts, since the loss is computed in between. The calls of other models before it, or instead of it, count for themselves, with
what lies between the last of them and backward where the root is not called. Nothing counts twice: what is a wait or a phase of
its own is none of a call that it lies in, and a call is none of a wait or phase that it lies in.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ForwardPass", "Size"]

Size = tuple[int | None, int | None, bool]
"""Samples, tokens, and whether they are tokens only where the model has an embedding."""


class ForwardPass:
    """Calls that wait for their backward pass. Times in ns; events: of the device clock. ignored: calls in evaluation mode that
    have not returned."""

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
        """The same of another model, in the device's time."""
        if not self._began:
            self._began, self._event = at, event

    def beside(self, at: int, ended: int, *, open_end: bool) -> None:
        """Another model was called. open_end: with gradients, so that the pass may go on until backward."""
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
        """Something else was done: a batch fetched, gradients cleared, a phase of its own."""
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
        """Backward starts: ns of the forward passes that belong to it, the size of the largest batch (a few points of a boundary
        beside those of the inside, both views of a pair), the number of the root's calls, and pairs of events."""
        if self._began:
            self._add(at, event)
        elif self._till:
            self._spent += at - self._till
        ended = self._spent, self._size, self._calls, self._pairs or []
        self.reset()
        return ended


def _numbers(size: Size) -> tuple[int, int]:
    """Samples and tokens, to compare."""
    return size[0] or 0, size[1] or 0
