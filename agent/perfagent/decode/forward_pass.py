"""Adds up the forward pass of a step from the calls of models before backward starts.

A pass begins with the first call of a model with gradients: of the root, or of another model. If the root returns the
loss, its return ends it; otherwise backward does, since the script computes the loss in between. A call without gradients
before it adds its own time. Waits and phases are taken off.
"""

from __future__ import annotations

from perfagent.device import Event

__all__ = ["ForwardPass", "Size"]

Size = tuple[int | None, int | None, bool]
"""Samples, tokens, and whether the tokens count only for a model with an embedding."""


class ForwardPass:
    """Calls that wait for their backward pass. Times in ns; events: of the device clock.

    began: of the running pass, or 0. ignored: calls in evaluation mode that have not returned.
    """

    __slots__ = ("_calls", "_event", "_pairs", "_paused", "_size", "_spent", "began", "ignored")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.began = self._paused = self._spent = self._calls = self.ignored = 0
        self._event: Event | None = None
        self._pairs: list[tuple[Event | None, Event]] = []
        self._size: Size | None = None

    def begin(self, at: int, event: Event | None) -> None:
        """A model is called with gradients."""
        if not self.began:
            self.began, self._event, self._paused = at, event, 0

    def called(self, size: Size | None) -> None:
        """The root is called."""
        self._calls += 1
        if self._size is None or (size is not None and _numbers(size) > _numbers(self._size)):
            self._size = size

    def ungraded(self, spent: int) -> None:
        """A model was called without gradients."""
        if not self.began:
            self._spent += spent

    def pause(self, spent: int) -> None:
        """The loop did something else: fetched a batch, cleared gradients, or spent time in another phase."""
        self._paused += spent

    def returned(self, at: int, event: Event | None, *, holds_loss: bool) -> None:
        if self.ignored:
            self.ignored -= 1
        elif holds_loss:
            self._close(at, event)

    def _close(self, at: int, event: Event | None) -> None:
        if self.began:
            self._spent += at - self.began - self._paused
            if event is not None:
                self._pairs.append((self._event, event))
            self.began = 0

    def end(self, at: int, event: Event | None) -> tuple[int, Size | None, int, list[tuple[Event | None, Event]]]:
        """Ends the pass when backward starts. Returns the ns of its forward passes, the size of the largest batch (not
        that of a few boundary points next to the interior; both views of a pair), the number of the root's calls, and
        pairs of events."""
        self._close(at, event)
        ended = self._spent, self._size, self._calls, self._pairs
        self.reset()
        return ended


def _numbers(size: Size) -> tuple[int, int]:
    """Returns samples and tokens for comparison."""
    return size[0] or 0, size[1] or 0
