"""Losses of trainings in which nothing is wrong, of every kind that a rule may take for trouble. Made of formulas and
noise: each kind takes a generator and answers series by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["HEALTHY", "STEPS", "Made", "made"]

STEPS = 3000
AT = np.arange(STEPS)
Floats = NDArray[np.float64]
Made = dict[str, Floats]
Kind = Callable[[np.random.Generator], Floats | Made]


def made(kind: str, seed: int) -> dict[str, list[float]]:
    """The series of one run of this kind."""
    found = HEALTHY[kind](np.random.default_rng(seed))
    columns = found if isinstance(found, dict) else {"loss": found}
    return {name: column.tolist() for name, column in columns.items()}


def _noise(draw: np.random.Generator, steps: int = STEPS) -> Floats:
    return draw.normal(size=steps)


def _correlated(draw: np.random.Generator, rho: float, steps: int = STEPS) -> Floats:
    values = np.empty(steps)
    values[0] = draw.normal()
    for step in range(1, steps):
        values[step] = rho * values[step - 1] + math.sqrt(1 - rho * rho) * draw.normal()
    return values


def _wave(draw: np.random.Generator, shortest: float, longest: float) -> Floats:
    """A sine of some period and phase."""
    return np.sin(2 * np.pi * (AT / draw.uniform(shortest, longest) + draw.uniform()))


def _power_law(start: float = 10.0, end: float = 2.5, steps: int = STEPS) -> Floats:
    """How the loss of a language model falls."""
    return end + (start - end) * (1 + np.arange(steps) / 20) ** -0.6


def _warmup_cosine(peak: float, warmup: int, steps: int = STEPS, lowest: float = 0.1) -> Floats:
    at = np.arange(steps)
    falling = lowest + (1 - lowest) * 0.5 * (1 + np.cos(np.pi * np.clip((at - warmup) / (steps - warmup), 0, 1)))
    return peak * np.where(at < warmup, (at + 1) / warmup, falling)


def _with_lr(draw: np.random.Generator, lr: Floats, effect: float) -> Made:
    """A loss that falls, and is higher where the learning rate is: the noise of large steps."""
    lag = np.empty(len(lr))
    level = lr[0]
    for step, rate in enumerate(lr):
        level += 0.05 * (rate - level)
        lag[step] = level
    loss = _power_law(6, 2) + effect * lag / lr.max() + 0.03 * _noise(draw, len(lr))
    return {"loss": loss, "lr": lr}


def _restarts(draw: np.random.Generator, period: int, times: int) -> Made:
    lr, length = [], period
    while len(lr) < STEPS:
        lr += [1e-6 + 5e-4 * (1 + math.cos(math.pi * at / length)) for at in range(length)]
        length *= times
    return _with_lr(draw, np.array(lr[:STEPS]), 0.3)


def _triangles(draw: np.random.Generator) -> Made:
    place = AT % 1000
    return _with_lr(draw, 1e-4 + 9e-4 * (1 - np.abs(place - 500) / 500), 0.3)


def _epochs(draw: np.random.Generator, steps: int = 400) -> Floats:
    """Memorized batches: at the start of an epoch the mean of what is still unknown, lower at each."""
    return 3.0 * 0.85 ** (AT // steps) * (1 - 0.1 * (AT % steps) / steps) + 0.05 * _noise(draw)


def _batch_ramp(draw: np.random.Generator) -> Floats:
    size = np.array([8, 16, 64, 256])[np.minimum(3, AT // 600)]
    return _power_law() + 2.0 * _noise(draw) / np.sqrt(size)


def _sparse_reward(draw: np.random.Generator) -> Floats:
    level = np.where(AT < 700, 1e-4, 0.05 + 0.1 * (1 - np.exp(-(AT - 700) / 600)))
    return level * draw.lognormal(sigma=0.4, size=STEPS)


def _gan(draw: np.random.Generator) -> Floats:
    """The generator's loss: up at first, then a drawn-out fight."""
    level = 0.7 + 3.0 * (1 - np.exp(-AT / 150)) + 0.5 * np.sin(AT / 90)
    return level * (1 + 0.25 * _noise(draw))


def _skipped(draw: np.random.Generator) -> Floats:
    """Now and then one batch of nothing but hard samples."""
    return _power_law() + 0.08 * _noise(draw) + np.where(draw.random(STEPS) < 0.004, 2.0, 0.0)


HEALTHY: dict[str, Kind] = {
    "language model": lambda draw: {
        "loss": _power_law() + 0.08 * _noise(draw), "lr": _warmup_cosine(6e-4, 300),
    },
    "language model, no warm-up": lambda draw: {
        "loss": _power_law() + 0.08 * _noise(draw), "lr": np.full(STEPS, 3e-4),
    },
    "heavy-tailed language model": lambda draw: _power_law() + 0.08 * draw.standard_t(3, size=STEPS),
    "warm-up until half of the run": lambda draw: {
        "loss": _power_law() + 0.08 * _noise(draw), "lr": _warmup_cosine(6e-4, 1500),
    },
    "fine-tuning whose warm-up disturbs at first": lambda draw: {
        "loss": 1.2 + 0.25 * (AT / 100) * np.exp(1 - AT / 100) - 0.1 * AT / STEPS + 0.06 * _noise(draw),
        "lr": _warmup_cosine(2e-5, 100),
    },
    "warm restarts": lambda draw: _restarts(draw, 750, 1),
    "cosine with longer and longer restarts": lambda draw: _restarts(draw, 400, 2),
    "triangular rate": _triangles,
    "one cycle": lambda draw: _with_lr(draw, _warmup_cosine(1e-2, 900, lowest=1e-4), 0.3),
    "rate lowered at milestones": lambda draw: _with_lr(draw, 0.1 * 0.1 ** (AT // 1000), 0.4),
    "epochs that begin high": _epochs,
    "small batches": lambda draw: np.abs(_power_law(2.3, 0.3) * (1 + 0.5 * _noise(draw))),
    "very noisy": lambda draw: _power_law(3, 1) * draw.lognormal(sigma=0.6, size=STEPS),
    "batch size ramp": _batch_ramp,
    "single hard batches": _skipped,
    "curriculum in small steps": lambda draw: 2.5 + 0.05 * (AT // 600) + 0.05 * _noise(draw),
    "curriculum, smooth": lambda draw: _power_law(3, 0.8) + 0.1 * (1 - np.exp(-AT / 1500)) + 0.1 * _noise(draw),
    "mix of the data changes": lambda draw: _power_law() + 0.06 * (AT > 1500) + 0.08 * _noise(draw),
    "distillation": lambda draw: 0.4 * _power_law(3, 1) + 0.02 * _noise(draw),
    "annealed penalty": lambda draw: 60 + 80 * np.exp(-AT / 150) + 2.0 * np.minimum(1, AT / 2000) + 1.5 * _noise(draw),
    "masked share of the input rises": lambda draw: _power_law(8, 2) + 2e-5 * AT + 0.1 * _noise(draw),
    "near zero": lambda draw: 2 * np.exp(-AT / 200) * np.exp(0.3 * _noise(draw)),
    "near zero with a floor": lambda draw: 2 * np.exp(-AT / 200) + 1e-4 * np.abs(_noise(draw)),
    "near zero, bumps": lambda draw: 2 * np.exp(-AT / 100) + 1e-3 * np.abs(_correlated(draw, 0.98)) ** 3,
    "smooth, whole batch": lambda draw: 0.5 * np.exp(-AT / 400) + 0.01,
    "constant": lambda draw: np.full(STEPS, 0.25) + 1e-5 * _noise(draw),
    "policy loss": lambda draw: 0.02 * _correlated(draw, 0.9) - 0.01,
    "policy loss that falls": lambda draw: -0.001 * AT**0.5 + 0.02 * _correlated(draw, 0.5),
    "value loss, sparse reward": _sparse_reward,
    "value loss, rewards grow": lambda draw: (0.5 + 20 * AT / STEPS) * draw.lognormal(sigma=0.5, size=STEPS),
    "temporal difference": lambda draw: np.exp(0.8 * _correlated(draw, 0.98)),
    "negative log-likelihood below zero": lambda draw: -5 + 4 * np.exp(-AT / 300) + 0.3 * _noise(draw),
    "from positive to negative": lambda draw: 5 - 0.01 * AT + 0.2 * _noise(draw),
    "white noise round zero": _noise,
    "heavy tails round zero": lambda draw: draw.standard_t(2, size=STEPS),
    "two kinds of episodes": lambda draw: _noise(draw) * np.where((AT // 300) % 2, 0.2, 1.0),
    "GAN, generator": _gan,
    "GAN, fast": lambda draw: 1 + 0.5 * np.sin(2 * np.pi * AT / 20) + 0.1 * _noise(draw),
    "GAN, slow": lambda draw: 0.7 + 0.3 * _wave(draw, 200, 900) + 0.02 * _noise(draw),
    "GAN, discriminator": lambda draw: (0.4 + 1.0 * np.exp(-AT / 60) + 0.3 * (1 - np.exp(-AT / 500))) * (
        1 + 0.3 * _noise(draw)
    ),
    "GAN round zero": lambda draw: 0.5 * _wave(draw, 300, 900) + 0.05 * _noise(draw),
    "slow wandering": lambda draw: 3 + 0.03 * _correlated(draw, 0.995) + 0.02 * _noise(draw),
    "short run": lambda draw: (_power_law(4, 2) + 0.1 * _noise(draw))[:120],
    "very short run": lambda draw: (2.3 + 0.1 * _noise(draw))[:12],
}  # fmt: skip
