"""What was measured of a step's gradients and weights, as numbers on their way to the sender's thread, where
decode/gradient_report.py names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfagent.device import Reading

__all__ = ["GradientNorms", "ParameterTable", "WeightChanges"]


@dataclass(eq=False, kw_only=True, slots=True)
class ParameterTable:
    """The parameters of one or more optimizers, in their order. Holds no parameter.

    sizes: how many numbers this rank holds of each.
    among: all names of the model, if other ranks hold the rest.
    world: number of ranks of the job. sharded: other ranks hold parts of these parameters.
    copies: for each parameter, how many ranks hold the same part; together: how many hold all that is not sharded. None
        if not known.
    same_everywhere: every rank has the same gradients (DDP).
    """

    names: Sequence[str]
    sizes: Sequence[int]
    among: Sequence[str] | None = None
    world: int = 1
    sharded: bool = False
    copies: Sequence[float] | None = None
    together: int | None = None
    same_everywhere: bool = False


@dataclass(eq=False, slots=True)
class GradientNorms:
    """The 2-norms of one pass. readings: values, and the places of their parameters. sharded: other ranks hold the rest.
    counts: how many numbers are NaN or Inf in the gradients at the places `suspects`."""

    readings: Sequence[tuple[Reading, Sequence[int]]]
    table: ParameterTable
    sharded: bool
    counts: Reading | None = None
    suspects: Sequence[int] = ()

    def ready(self) -> bool:
        return all(reading.ready() for reading, _ in self.readings) and (self.counts is None or self.counts.ready())


@dataclass(eq=False, slots=True)
class WeightChanges:
    """How far a step moved the weights. readings: norms of the weights, then of their changes, and the places of their
    parameters. factors: for each parameter, how many numbers one of its sample stands for."""

    readings: Sequence[tuple[Reading, Sequence[int]]]
    factors: Sequence[float]
    table: ParameterTable

    def ready(self) -> bool:
        return all(reading.ready() for reading, _ in self.readings)
