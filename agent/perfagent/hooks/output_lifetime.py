"""Frees a model's outputs when backward starts, where the time of the model's call counts as the forward pass.

A loop drops the outputs of one step when it takes those of the next: `logits, loss = model(x, y)` frees the old logits'
memory, and the nodes of the old loss's graph, when the model has returned. A timer around the model's call includes
that time, a hook in the call does not, and it is long for large outputs: dropping logits of GPT-2's vocabulary takes 6
to 10 % of a small model's forward pass. (`loss = model(x).loss` drops the new logits there.)

So the last outputs that the loop still has when it calls the model again, and the new outputs, are held from the
model's return until backward begins: a timer around backward and ours both include the time. Memory lives no longer
than the loop's own names would keep it, except for the time between the two calls, and for five seconds if backward
never comes. Nothing is held where a device's clock runs, since that clock does not see the host's memory.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any

from perfagent.boundary.guard import guarded

__all__ = ["Outputs"]

_MOST_ITEMS = 16
_MOST_HELD_S = 5.0
_NEGLIGIBLE_NS = 5_000
"""About the cost of holding with cold caches."""
_LOOKS = 8
_REST_CALLS = 1000


class Outputs:
    """The outputs of one root model.

    held: the objects that live until backward begins.
    waits: no backward pass has begun since the model returned.
    rest: calls to skip. If dropping the outputs costs next to nothing, it is checked once in a thousand calls. The
        callers count this down, since every call of a hook costs time.
    """

    __slots__ = ("_cheap", "_last", "_since", "held", "rest", "waits")

    def __init__(self) -> None:
        self._cheap = self.rest = 0
        self._last: list[Any] = []  # weak references to the model's last outputs
        self.held: Any = None
        self.waits = True
        self._since = 0.0

    def called(self) -> None:
        """Called with the model: holds the outputs of its last call that the loop still has and will drop when
        this call returns.

        Holds nothing if no backward pass came after the last call: none might come after this one.
        """
        self.held = None
        if not self.waits:
            self.held = [alive for one in self._last if (alive := one()) is not None]

    @guarded
    def returned(self, output: Any) -> None:
        """Called when the model returns an output that holds the loss."""
        self._last = [*map(weakref.ref, _parts(output))]
        self.held = None if self.waits else (self.held, output)
        self.waits, self._since = True, time.monotonic()

    def let_go(self) -> None:
        """Called when backward begins: frees the outputs."""
        self.waits = False
        if self.held is None:
            return
        began = time.perf_counter_ns()
        self.held = None
        self._cheap = self._cheap + 1 if time.perf_counter_ns() - began < _NEGLIGIBLE_NS else 0
        if self._cheap >= _LOOKS:
            self._cheap, self.rest, self._last = 0, _REST_CALLS, []

    def expire(self) -> None:
        """Frees outputs that were held for long, since no backward pass came. Any thread."""
        if self.held and time.monotonic() - self._since > _MOST_HELD_S:
            self.held = None


def _parts(output: Any) -> Iterator[Any]:
    """Yields the parts of an output that hold memory and support weak references."""
    if isinstance(output, sys.modules["torch"].Tensor):
        yield output
        return
    if type(output).__weakrefoffset__:  # ModelOutput of transformers, a dataclass
        yield output
    items: Any = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    for item in islice(items, _MOST_ITEMS):
        if type(item).__weakrefoffset__:
            yield item
