"""What a model returned is let go of when backward starts, where the model's call is taken for the forward pass.

A loop drops the outputs of one step where it takes those of the next: `logits, loss = model(x, y)` gives the old logits' memory
back, and the nodes of the old loss's graph, when the model has returned. A timer round the model's call sees what that takes, a
hook in the call does not, and it is much where outputs are large: logits of GPT-2's vocabulary take 6 to 10 % of a small model's
forward pass to drop. (`loss = model(x).loss` drops the new logits there.)

So what the loop still has of the last outputs when the model is called again, and the new outputs, are held from the model's
return until backward begins: a timer round backward and ours both see it. No memory lives longer than the loop's own names would
let it, but for what lies between the two calls, and for five seconds where backward never comes. Not where a device's clock runs:
it does not see the host's memory.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from itertools import islice
from time import monotonic, perf_counter_ns
from typing import Any

from perfagent.boundary.guard import guarded

__all__ = ["Outputs"]

_MOST_ITEMS = 16
_MOST_HELD_S = 5.0
_NEGLIGIBLE_NS = 5_000
"""About what holding costs with cold caches."""
_LOOKS = 8
_REST_CALLS = 1000


class Outputs:
    """Of one root model. held: what lives until backward begins. waits: no backward pass has begun since the model returned.

    Where it costs next to nothing to drop what the model returns, that is looked at once in a thousand calls. rest: so many are
    left to come, counted down by whoever would call the methods, since a hook's every call costs.
    """

    __slots__ = ("_cheap", "_last", "_since", "held", "rest", "waits")

    def __init__(self) -> None:
        self._cheap = self.rest = 0
        self._last: list[Any] = []  # weak references to what the model returned last
        self.held: Any = None
        self.waits = True
        self._since = 0.0

    def called(self) -> None:
        """The model is called: what the loop still has of the last call it will drop when this one returns.

        Nothing is held where no backward pass came after that call: it might not come after this one.
        """
        self.held = None
        if not self.waits:
            self.held = [alive for one in self._last if (alive := one()) is not None]

    @guarded
    def returned(self, output: Any) -> None:
        """The model returns this, and in it the loss."""
        self._last = [*map(weakref.ref, _parts(output))]
        self.held = None if self.waits else (self.held, output)
        self.waits, self._since = True, monotonic()

    def let_go(self) -> None:
        """Backward begins."""
        self.waits = False
        if self.held is None:
            return
        began = perf_counter_ns()
        self.held = None
        self._cheap = self._cheap + 1 if perf_counter_ns() - began < _NEGLIGIBLE_NS else 0
        if self._cheap >= _LOOKS:
            self._cheap, self.rest, self._last = 0, _REST_CALLS, []

    def expire(self) -> None:
        """What has been held for long goes: no backward pass came. Any thread."""
        if self.held and monotonic() - self._since > _MOST_HELD_S:
            self.held = None


def _parts(output: Any) -> Iterator[Any]:
    """What of an output holds memory and can be referred to weakly."""
    if isinstance(output, sys.modules["torch"].Tensor):
        yield output
        return
    if type(output).__weakrefoffset__:  # ModelOutput of transformers, a dataclass
        yield output
    items: Any = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    for item in islice(items, _MOST_ITEMS):
        if type(item).__weakrefoffset__:
            yield item
