"""Telemetry as training jobs send it: 16 ranks, 40 metrics each, four steps a second, from a fixed seed.

Losses and gradient norms are float32 noise round a curve, utilization and temperature whole numbers, memory changes rarely, the
learning rate follows its schedule. A batch is 10,240 samples: either 16 ranks x 16 steps, or 1 rank x 256 steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["METRICS", "RANKS", "Piece", "batch"]

RANKS, METRICS = 16, 40
NAMES = [
    *(f"loss/{at}" for at in range(10)),
    *(f"grad/norm/{at}" for at in range(8)),
    *(f"gpu/value/{at}" for at in range(8)),
    *(f"memory/{at}" for at in range(6)),
    *(f"lr/{at}" for at in range(4)),
    *(f"rate/{at}" for at in range(4)),
]
_noise = np.random.default_rng(7).standard_normal((RANKS, METRICS, 1024))


@dataclass
class Piece:
    """What one rank sends at once. time: Unix seconds (steps,); values: (METRICS, steps) float64."""

    rank: int
    step: np.ndarray
    time: np.ndarray
    values: np.ndarray


def batch(case: str, number: int) -> list[Piece]:
    """The number-th batch of a case: "ranks" (16 pieces of 640 samples) or "frame" (one piece of 10,240 samples)."""
    if case == "ranks":
        return [_piece(rank, number * 16, 16) for rank in range(RANKS)]
    return [_piece(number % RANKS, number // RANKS * 256, 256)]


def _piece(rank: int, first: int, steps: int) -> Piece:
    step = np.arange(first, first + steps)
    noise = _noise[rank][:, step & 1023]
    values = np.empty((METRICS, steps))
    values[0:10] = (8.0 / (1 + step / 200.0) ** 0.4 + 0.05 * noise[0:10]).astype(np.float32)
    values[10:18] = np.exp(0.4 * noise[10:18]).astype(np.float32)
    values[18:26] = np.clip(np.round(92 + 4 * noise[18:26]), 0, 100)
    values[26:32] = 71_000_000_000 + (step // 512) * 2_097_152.0
    values[32:36] = 3e-4 * np.minimum(1, (step + 1) / 2000.0)
    values[36:40] = (1500 + 20 * noise[36:40]).astype(np.float32)
    time = 1.79e9 + step * 0.25 + np.round(noise[0] * 3) / 1000 + rank / 1000
    return Piece(rank, step, time, values)
