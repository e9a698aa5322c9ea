"""What the window reads of a frame: groups of series that share their steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Samples"]


class Samples(Protocol):
    """A group of a frame. Groups of a run have the same names again and again, so numbers are asked for by the places
    of their names."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def rows(self) -> int: ...

    def step_list(self) -> list[int]:
        """int64 (rows,)."""

    def time_list(self) -> list[float]:
        """float64 (rows,), Unix seconds by the sender's clock."""

    def numbers(self, places: Sequence[int]) -> list[Sequence[float]]:
        """float32 or float64 (rows,) of each name."""
