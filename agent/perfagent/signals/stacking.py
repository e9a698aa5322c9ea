"""The norms of many tensors in as few kernels as their place allows.

On a GPU `torch._foreach_norm` takes all of them in a few launches. On the CPU it is a loop with 2 µs of its own for each tensor,
and stacking its results takes 0.6 µs more for each: of a transformer's 306 gradients two thirds are biases and scales of a few
hundred numbers, for which that is nearly everything. Those of one shape are stacked first, 0.3 µs each, and reduced as the rows
of one matrix.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

__all__ = ["MOST_NUMBERS", "Order"]

MOST_NUMBERS = 1024
"""Of a tensor that is stacked: copying more would take longer than it saves."""
_FEWEST = 8
"""Tensors of one shape that are stacked: two more operations pay for no fewer."""

_Pick = Callable[[Sequence[Any]], Sequence[Any]]


class Order:
    """Which tensors of a list are taken together, found once and used in every pass. Holds no tensor.

    places: the norms come in this order; the places in the list of the tensors they are of.
    """

    __slots__ = ("_alone", "_stacks", "of", "places")

    def __init__(self, of: Sequence[int], shapes: Sequence[tuple[int, ...]] | None) -> None:
        """of: places of the tensors that are there. shapes: of all places; None where nothing is to be stacked."""
        self.of = list(of)
        alike: dict[tuple[int, ...], list[int]] = {}
        if shapes is not None:
            for place in self.of:
                alike.setdefault(shapes[place], []).append(place)
        stacks = [places for shape, places in alike.items() if len(places) >= _FEWEST and math.prod(shape) <= MOST_NUMBERS]
        stacked = {place for places in stacks for place in places}
        alone = [place for place in self.of if place not in stacked]
        self.places = [*alone, *(place for places in stacks for place in places)]
        self._alone = _pick(alone)
        self._stacks = [_pick(places) for places in stacks]

    def norms(self, tensors: Sequence[Any], dtype: Any) -> Any:
        """The 2-norms of tensors of one device, as one tensor of `dtype` (None: of theirs).

        Raises what torch raises (RuntimeError, NotImplementedError, TypeError) where they are not what their shapes promised.
        """
        torch = sys.modules["torch"]
        found = []
        alone = self._alone(tensors)
        if alone:
            found.append(torch.stack(torch._foreach_norm(alone, 2, dtype=dtype)))
        for pick in self._stacks:
            rows = torch.stack(pick(tensors))
            found.append(torch.linalg.vector_norm(rows.reshape(len(rows), rows.numel() // len(rows)), 2, 1, dtype=dtype))
        return found[0] if len(found) == 1 else torch.cat(found)


def _pick(places: list[int]) -> _Pick:
    """The tensors at these places; itemgetter takes them without a loop, but only where there are two or more."""
    return itemgetter(*places) if len(places) > 1 else lambda tensors: [tensors[place] for place in places]
