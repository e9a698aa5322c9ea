"""Lengths that several tests of the data part use."""

from __future__ import annotations

import random

__all__ = ["text_lengths"]


def text_lengths(number: int, *, most: int = 2048, seed: int = 0) -> list[int]:
    """Lengths as texts have them: log-normal, a mean of about 390 tokens, some cut at `most`."""
    draw = random.Random(seed)
    return [max(1, min(most, int(draw.lognormvariate(5.5, 1)))) for _ in range(number)]
