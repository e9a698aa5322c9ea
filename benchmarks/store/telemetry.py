"""Telemetry as training jobs send it: 16 ranks, four steps a second, from a fixed seed, in frames of several shapes.

Losses and gradient norms are float32 noise round a curve, utilization and temperature whole numbers, memory changes
rarely, the learning rate follows its schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["CASES", "RANKS", "Case", "Piece", "batch"]

RANKS = 16
PERIOD = 1024
KINDS = [("loss", 10), ("grad/norm", 8), ("gpu/value", 8), ("memory", 6), ("lr", 4), ("rate", 4)]  # of 40 names


@dataclass(frozen=True)
class Case:
    """A batch: one frame of `names` x `steps` from each of `ranks` ranks; with fewer than RANKS they take turns."""

    ranks: int
    names: int
    steps: int

    @property
    def points(self) -> int:
        return self.ranks * self.names * self.steps

    @property
    def words(self) -> str:
        frames = "one frame" if self.ranks == 1 else f"{self.ranks} frames"
        return f"{frames} of {self.points // self.ranks:,} samples ({self.names} names x {self.steps:,} steps)"

    def series(self) -> list[str]:
        """The names, of every kind as many as its share."""
        kinds = [kind for kind, count in KINDS for _ in range(count)]
        chosen = [kinds[at * len(kinds) // self.names % len(kinds)] for at in range(self.names)]
        return [f"{kind}/{at}" for at, kind in enumerate(chosen)]


CASES = {
    "ranks": Case(RANKS, 40, 16),
    "frame": Case(1, 40, 256),
    "wide": Case(1, 100, 100),
    "256-names": Case(1, 256, 40),
    "640-names": Case(1, 640, 16),
    "2000-names": Case(1, 2000, 5),  # as many as a run may have
    "16-names": Case(1, 16, 640),
    "10-names": Case(1, 10, 1024),
    "4-names": Case(1, 4, 2560),
    "1-name": Case(1, 1, 10_240),
}


@dataclass
class Piece:
    """What one rank sends at once. time: Unix seconds (steps,); values: (names, steps) float64."""

    rank: int
    step: np.ndarray
    time: np.ndarray
    values: np.ndarray


def batch(case: str, number: int) -> list[Piece]:
    """The number-th batch of a case."""
    shape = CASES[case]
    if shape.ranks == RANKS:
        return [_piece(shape, rank, number * shape.steps) for rank in range(RANKS)]
    return [_piece(shape, number % RANKS, number // RANKS * shape.steps)]


def _piece(shape: Case, rank: int, first: int) -> Piece:
    step = np.arange(first, first + shape.steps)
    noise = _noise(shape.names)[rank][:, step % PERIOD]
    values = np.empty((shape.names, shape.steps))
    for at, name in enumerate(shape.series()):
        values[at] = _values(name, step, noise[at])
    time = 1.79e9 + step * 0.25 + np.round(noise[0] * 3) / 1000 + rank / 1000
    return Piece(rank, step, time, values)


def _values(name: str, step: np.ndarray, noise: np.ndarray) -> np.ndarray:
    match name.rpartition("/")[0]:
        case "loss":
            return (8.0 / (1 + step / 200.0) ** 0.4 + 0.05 * noise).astype(np.float32)
        case "grad/norm":
            return np.exp(0.4 * noise).astype(np.float32)
        case "gpu/value":
            return np.clip(np.round(92 + 4 * noise), 0, 100)
        case "memory":
            return 71_000_000_000 + (step // 512) * 2_097_152.0
        case "lr":
            return 3e-4 * np.minimum(1, (step + 1) / 2000.0)
        case _:
            return (1500 + 20 * noise).astype(np.float32)


_noises: dict[int, np.ndarray] = {}


def _noise(names: int) -> np.ndarray:
    """(RANKS, names, PERIOD), the same in every process."""
    if names not in _noises:
        _noises[names] = np.random.default_rng(7).standard_normal((RANKS, names, PERIOD))
    return _noises[names]
