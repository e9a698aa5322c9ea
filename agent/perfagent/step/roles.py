"""The parts of a run that a step's state refers to, by what is asked of them: no import points to the rooms above. Each
protocol is that of the class of its name in `hooks`, `measure`, `decode` or `causes`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from perfagent.device import DeviceClock, Value
    from perfagent.step.governor import Governor
    from perfagent.step.row import OptimizerGradients, Row, StepRow
    from perfagent.step.trace import Entry

__all__ = [
    "BatchContents", "GradientSchedule", "Investigator", "JointStep", "LoopFacts", "OptimizerSelection", "RunLinks",
    "StepFlops", "StepReader", "StepWitness",
]  # fmt: skip


class OptimizerSelection(Protocol):
    began: int
    model_size: int

    @property
    def primary(self) -> Optimizer | None: ...
    @property
    def model(self) -> nn.Module | None: ...
    @property
    def had_model(self) -> bool: ...
    def trains(self, model: nn.Module) -> None: ...
    def all(self) -> list[Optimizer]: ...
    def make_primary(self, optimizer: Optimizer) -> None: ...
    def ensure_primary(self, optimizer: Optimizer) -> None: ...
    def maybe_replace_primary(self, optimizer: Optimizer) -> bool: ...
    def find_first_model(self, optimizer: Optimizer) -> None: ...
    def find_model(self, optimizer: Optimizer) -> None: ...
    def has_lost_model(self) -> bool: ...
    def at_boundary(self) -> bool: ...


class GradientSchedule(Protocol):
    rank: int

    def measure(self, optimizer: Optimizer, *, after: bool = False) -> None: ...
    def measure_pieces(
        self, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], model: nn.Module, carried: Value | None
    ) -> None: ...
    def compares(self) -> bool: ...
    def measure_other(self, optimizer: Optimizer) -> Any: ...
    def keep_other(self, optimizer: Optimizer) -> Any: ...
    def compare_other(self, optimizer: Optimizer, kept: Any) -> Any: ...
    def finish(self, optimizer: Optimizer, step_ns: int) -> None: ...
    def found_model(self) -> None: ...
    def took_on_device(self, ns: float, cost_ns: int) -> None: ...
    def count_next(self, places: Sequence[int], known: Collection[int]) -> None: ...
    def come_back(self) -> None: ...


class JointStep(Protocol):
    clipped: tuple[int, Any]
    kept: Any

    def forget(self) -> None: ...
    def steps(self, optimizer: Optimizer, *, skipped: bool = False) -> None: ...
    def moved(self, optimizer: Optimizer) -> None: ...
    def of_step(self) -> dict[int, OptimizerGradients]: ...
    def measure_clipped(self, clips: Any, clip: Any) -> None: ...


class LoopFacts(Protocol):
    averages: bool | None
    divided_later: bool
    embedded: bool
    evaluations: Any
    batches: Any

    def trains(self, entries: Sequence[Entry]) -> bool: ...


class StepReader(Protocol):
    flops: Any
    gradients: Any
    investigator: Any
    loss_by_user: bool
    epoch: float

    def loss_is_bad(self, row: StepRow) -> bool: ...
    def needs_next_step(self, row: StepRow) -> bool: ...
    def row(
        self, row: StepRow, rare: dict[str, float] | None = None, *, user_loss: float | None = None, passes: int = 0,
        clock: DeviceClock | None = None,
    ) -> Row: ...  # fmt: skip


class Investigator(Protocol):
    stop: Any

    def passing(self, error: BaseException) -> None: ...
    def suspect(self, loss: torch.Tensor | None) -> bool: ...
    def stays_bad(self, first: int) -> bool: ...
    def pressing(self, taken: Any) -> None: ...
    def judged(self, step: int, values: dict[str, float]) -> None: ...


class StepWitness(Protocol):
    def measure(self) -> None: ...


class BatchContents(Protocol):
    cost_ns: int

    def inspect(self, iteration: int, batch: object) -> None: ...
    def begun(self, loader: Any, iteration: int) -> None: ...
    def ended(self, iteration: int) -> None: ...
    def report(self) -> dict[str, float]: ...


class StepFlops(Protocol):
    def add(self, step: int, values: dict[str, float], samples: int, tokens: int, seconds: float) -> None: ...


@dataclass(slots=True)
class RunLinks:
    """The parts of the run that hooks call.

    governor: decides how often gradients are measured.
    on_resumed: gets the number of the next step. on_event: the sender's: (kind, data, *, step).
    pausing: after a step and before the loop continues, the agent does something that takes long.
    captured: the optimizers that have stepped while a graph is captured; None while none is.
    """

    governor: Governor
    reader: StepReader
    facts: LoopFacts
    gradient_schedule: GradientSchedule = field(init=False)
    joint_step: JointStep = field(init=False)
    investigator: Any = None
    witness: StepWitness | None = None
    on_first_step: Callable[[Optimizer], None] | None = None
    on_resumed: Callable[[int], None] | None = None
    on_next_model: Callable[[bool], None] | None = None
    on_next_optimizer: Callable[[Optimizer], None] | None = None
    on_event: Callable[..., None] | None = None
    captured: list[Optimizer] | None = None
    pausing: bool = False
    ended: bool = False
