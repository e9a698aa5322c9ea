"""The parts of one step."""

from __future__ import annotations

from typing import Any

from perfagent.decode.forward_pass import Size
from perfagent.device import Value

__all__ = ["NOTHING", "Breakdown"]

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
