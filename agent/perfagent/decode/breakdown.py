"""The parts of one step, and of its forward pass."""

from __future__ import annotations

from typing import Any

from perfagent.device import Event, Value

__all__ = ["NOTHING", "Breakdown", "ForwardPass", "Size"]

Size = tuple[int | None, int | None, bool]
"""Samples, tokens, and whether the tokens count only for a model with an embedding."""
NOTHING: dict[str, Any] = {}
"""What most steps have of what only some have: shared, so never changed."""


class Breakdown:
    """The parts of one step. None: not known. device: pairs of events by phase, where a device clock runs.

    Most steps keep most of these class-level defaults, so creating a Breakdown costs next to nothing.
    """

    data_ns: int | None = None
    forward_ns: int | None = None
    backward_ns = optimizer_ns = 0
    batches = forwards = 0
    root: Value | None = None
    """The loss of the last backward pass that had one."""
    samples = tokens = embedded_tokens = 0
    phases_ns: dict[str, int] = NOTHING
    device: dict[str, list[tuple[Any, Any]]] = NOTHING
    device_inside: tuple[tuple[str, Any, Any], ...] = ()
    """(phase, begin, end) of parts that are counted separately: their time is taken off the phase that
    contains them."""

    @property
    def has_size(self) -> bool:
        return bool(self.samples or self.tokens or self.embedded_tokens)

    def take(self, size: Size | None) -> None:
        if size is None:
            return
        samples, tokens, only_with_embedding = size
        self.samples += samples or 0
        if only_with_embedding:
            self.embedded_tokens += tokens or 0
        else:
            self.tokens += tokens or 0

    def pair(self, phase: str, begin: Any, end: Any, *, inside: str = "") -> None:
        """Adds events of the device's clock around a part of a phase. inside: the other phase that
        contains the part."""
        if begin is not None and end is not None:
            self.device.setdefault(phase, []).append((begin, end))
            if inside:
                self.device_inside += ((inside, begin, end),)


class ForwardPass:
    """Calls that wait for their backward pass. Times in ns; events: of the device clock.

    A pass begins with the first call of a model with gradients: of the root, or of another model. If the root returns the
    loss, its return ends it; otherwise backward does, since the script computes the loss in between. A call without
    gradients before it adds its own time. Waits and phases are taken off.

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
