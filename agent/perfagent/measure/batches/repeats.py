"""Counts batches that come again within an epoch, by their fingerprints.

A batch counts as repeated if the one before was the same, or if another batch of the same epoch was. An epoch is one
iteration of a loader. In a loader without an end, batches that come again at a constant distance are its next pass over
the data; those that come again at any distance count only once the iteration has ended. A loader that is begun for each
batch (`next(iter(loader))`) goes on with its epoch. Loaders that no step follows, such as those of evaluations, do not
count.
"""

from __future__ import annotations

__all__ = ["Repeats"]

_MOST_KNOWN = 2**15
"""Most fingerprints of an epoch (3 MB); then they are forgotten."""
_PASS = 3
"""So many repeats in a row at one distance are a new pass over the data."""


class Repeats:
    """The batches of one epoch. count: those that the one before was the same as, and at the end all that came before."""

    __slots__ = ("_at_a_distance", "_distance", "_in_a_row", "_known", "count")

    def __init__(self) -> None:
        self._known: dict[int, int] = {}  # fingerprint -> number of the batch that had it last
        self.count = self._at_a_distance = 0
        self._distance = self._in_a_row = 0  # of the newest repeat, and how many in a row had it

    @property
    def distinct(self) -> int:
        return len(self._known)

    def note(self, mark: int, number: int, rows: int) -> None:
        """mark: the fingerprint of a batch. number: of the batch, those included that were passed over."""
        before = self._known.get(mark)
        if before is None and len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[mark] = number
        if before is None:
            self._distance = self._in_a_row = 0
        elif number == before + 1:
            self.count += 1
        elif rows > 1:  # samples one by one may be drawn twice
            self._in_a_row = self._in_a_row + 1 if number - before == self._distance else 1
            self._distance = number - before
            self._at_a_distance += 1
            if self._in_a_row >= _PASS:
                self._at_a_distance = self._distance = self._in_a_row = 0
                self._known = {mark: number}

    def end(self) -> None:
        """The epoch is over."""
        self.count, self._at_a_distance = self.count + self._at_a_distance, 0
