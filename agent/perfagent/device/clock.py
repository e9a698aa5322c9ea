"""Times a device by events: the host runs ahead of it, so host time says little there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from perfagent.device.backends import Event, Stream, backend_of
from perfagent.device.readings import uses

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceClock"]


class DeviceClock:
    """Records marks on the current stream of the device that computes, which need not be the current device
    (`model.to("cuda:1")` without `set_device`), and follows the training from one device and stream to another.

    Of a kind of device without events every mark is None.
    """

    __slots__ = (
        "_backend", "_computes", "_event", "_free", "_known", "_moved", "_parts", "_side", "_stream", "blocked", "device",
    )  # fmt: skip

    def __init__(self, device: torch.device) -> None:
        self._backend = backend = backend_of(device.type)
        self._event = backend.event
        self.blocked: Callable[[], bool] = backend.is_capturing if backend.has_events else lambda: True
        self._moved = False
        if not backend.used:
            uses(backend, device)
        self._start(device)

    def _start(self, device: torch.device) -> None:
        self.device = device
        self._free: list[Event] = []
        self._known: tuple[int, ...] = (-1, device.index)
        """Indices of the devices that the marks are of, and that of the CPU."""
        self._parts: list[tuple[torch.device, Event]] = []
        self._stream: Stream | None = None  # that of the newest mark
        self._computes: Stream | None = None  # that of the newest backward pass
        self._side: Stream | None = None

    def mark(self) -> Event | None:
        """Returns an event recorded on the device's current stream. Returns None while a graph is captured, and on
        a lost device: the script learns of that from its own calls."""
        try:
            if self.blocked():
                return None
            try:
                event = self._free.pop()
            except IndexError:
                event = self._event(timed=True)
            self._stream = stream = self._backend.current_stream(self.device)
            event.record(stream if self._side is None else self._behind_all(self._side))
        except RuntimeError:
            return None
        return event

    def begin(self, root: torch.Tensor | None) -> Event | None:
        """Marks the begin of a backward pass, whose device and stream are those of the step from here on. root: the
        tensor that it starts from; None if there are several."""
        if root is not None and root.get_device() not in self._known:
            self._moved = True
            self._start(root.device)
        event = self.mark()
        self._computes = self._stream
        return event

    def mark_if_computing(self) -> Event | None:
        """Returns a mark if the current stream is the one that computes."""
        stream = self._computes and self._backend.current_stream(self.device)
        return self.mark() if stream is not None and (stream is self._computes or stream == self._computes) else None

    def span(self, devices: Iterable[torch.device]) -> None:
        """From here on, a mark is reached when all these devices have come to it (layers of one model on several devices).
        A stream of ours waits for the others, so that no stream of the script does."""
        others = [one for one in devices if one.type == self.device.type and one != self.device]
        if not others or not self._backend.has_events:
            self._side, self._known = None, self._known[:2]
            return
        self._known = *self._known[:2], *(one.index for one in others)
        self._parts = [(one, self._event()) for one in (self.device, *others)]
        self._side = self._backend.stream(self.device)

    def _behind_all(self, side: Stream) -> Stream:
        for device, event in self._parts:
            event.record(self._backend.current_stream(device))
            side.wait_event(event)
        return side

    def seconds(self, begin: Event, end: Event) -> float | None:
        """Returns the device time between two marks, once both are reached; None if they are of two devices, or the
        device was lost. Any thread."""
        try:
            return float(begin.elapsed_time(end)) / 1e3
        except RuntimeError:
            return None

    def release(self, events: list[Event]) -> None:
        """Takes back events that nobody reads any more, for reuse."""
        self._free.extend([event for event in events if event.device == self.device] if self._moved else events)
