"""A set of whole numbers that finds its neighbors: the smallest from a number on, the largest up to one.

One bit a number, and one a block of numbers, in Python's integers: both questions are a few operations on machine
words, for any number of members.
"""

from __future__ import annotations

__all__ = ["Integers"]


class Integers:
    """Of numbers from 0 to most."""

    def __init__(self, most: int) -> None:
        self._bits = max(6, (most + 1).bit_length() // 2)  # of a block: as many numbers in it as there are blocks
        self._mask = (1 << self._bits) - 1
        self._blocks = [0] * ((most >> self._bits) + 1)
        self._used = 0  # blocks that hold something

    def add(self, number: int) -> None:
        block = number >> self._bits
        self._blocks[block] |= 1 << (number & self._mask)
        self._used |= 1 << block

    def discard(self, number: int) -> None:
        block = number >> self._bits
        self._blocks[block] &= ~(1 << (number & self._mask))
        if not self._blocks[block]:
            self._used &= ~(1 << block)

    def smallest_from(self, number: int) -> int | None:
        block = number >> self._bits
        here = self._blocks[block] >> (number & self._mask)
        if here:
            return number + (here & -here).bit_length() - 1
        later = self._used >> (block + 1)
        if not later:
            return None
        block += (later & -later).bit_length()
        found = self._blocks[block]
        return (block << self._bits) + (found & -found).bit_length() - 1

    def largest_to(self, number: int) -> int | None:
        """number: 0 or more."""
        block = number >> self._bits
        here = self._blocks[block] & ((2 << (number & self._mask)) - 1)
        if here:
            return (block << self._bits) + here.bit_length() - 1
        earlier = self._used & ((1 << block) - 1)
        if not earlier:
            return None
        block = earlier.bit_length() - 1
        return (block << self._bits) + self._blocks[block].bit_length() - 1
