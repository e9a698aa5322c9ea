"""What was measured of a step's gradients, weights and units, as numbers on their way to the sender's thread, where
decode/gradient_report.py and deferred_values.py name them. `ready` never blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfagent.device import reached, ready

if TYPE_CHECKING:
    from perfagent.device import Event, Reading
    from perfagent.wire.evidence import BatchTensor

__all__ = ["DeadShares", "Deferred", "GradientNorms", "ParameterTable", "PassTime", "WeightChanges", "Witnessed"]


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


@dataclass(eq=False, slots=True)
class DeadShares:
    """The share of dead units of each activation module, 0 to 1. readings: values, and the names of their modules."""

    readings: Sequence[tuple[Reading, Sequence[str]]]

    def ready(self) -> bool:
        return all(reading.ready() for reading, _ in self.readings)


@dataclass(eq=False, slots=True)
class PassTime:
    """Marks of the device's clock around a pass. cost_ns: of the training thread."""

    begin: Event
    end: Event
    cost_ns: int

    def ready(self) -> bool:
        return reached(self.end)


@dataclass(eq=False, slots=True)
class Witnessed:
    """Numbers of a step whose loss was late (measure/step_witness.py). names: of parameters, largest: the magnitudes of their
    gradients. inputs: of the model, each with its highest number."""

    names: Sequence[str]
    largest: Reading | None
    inputs: Sequence[tuple[BatchTensor, Reading | None]]

    def ready(self) -> bool:
        return ready(self.largest) and all(ready(reading) for _, reading in self.inputs)


Deferred = DeadShares | PassTime | Witnessed
"""A measurement that only some steps have."""
