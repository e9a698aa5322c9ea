"""The parts of a run that a step's state refers to, by what is asked of them: no import points to the rooms above. Each
protocol is that of the class of its name in `hooks`, `measure` or `causes`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from perfagent.device import Value
    from perfagent.step.clusters import LoopFacts
    from perfagent.step.governor import Governor
    from perfagent.step.row import OptimizerGradients
    from perfagent.wire.evidence import BatchTensor

__all__ = ["GradientSchedule", "Investigator", "JointStep", "OptimizerSelection", "RunLinks"]


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
    def measure(self, optimizer: Optimizer, *, after: bool = False) -> None: ...
    def measure_pieces(
        self, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], model: nn.Module, carried: Value | None
    ) -> None: ...
    def finish(self, optimizer: Optimizer, step_ns: int) -> None: ...
    def found_model(self) -> None: ...


class JointStep(Protocol):
    clipped: tuple[int, Any]
    kept: Any

    def forget(self) -> None: ...
    def steps(self, optimizer: Optimizer, *, skipped: bool = False) -> None: ...
    def moved(self, optimizer: Optimizer) -> None: ...
    def of_step(self) -> dict[int, OptimizerGradients]: ...
    def measure_clipped(self, clips: Any, clip: Any) -> None: ...


class Investigator(Protocol):
    stop: Any

    def add(self, task: Any) -> None: ...
    def passing(self, error: BaseException) -> None: ...
    def suspect(self, loss: torch.Tensor | None) -> bool: ...
    def stays_bad(self, first: int) -> bool: ...
    def pressing(self, taken: Any) -> None: ...
    def judged(self, step: int, values: dict[str, float]) -> None: ...
    def witnessed(
        self, step: int, names: list[str], among: Sequence[str] = (), inputs: Sequence[BatchTensor] = ()
    ) -> None: ...


@dataclass(slots=True)
class RunLinks:
    """The parts of the run that hooks call.

    governor: decides how often gradients are measured. rank: global.
    on_late_loss: before gradients or weights change, while the step's loss has not come from its device.
    on_resumed: gets the number of the next step. on_event: the sender's: (kind, data, *, step).
    pausing: after a step and before the loop continues, the agent does something that takes long.
    captured: the optimizers that have stepped while a graph is captured; None while none is.
    """

    governor: Governor
    facts: LoopFacts
    rank: int = 0
    gradient_schedule: GradientSchedule = field(init=False)
    joint_step: JointStep = field(init=False)
    investigator: Investigator = field(init=False)
    on_late_loss: Callable[[], None] = field(init=False)
    on_first_step: Callable[[Optimizer], None] = field(init=False)
    on_resumed: Callable[[int], None] = field(init=False)
    on_next_model: Callable[[bool], None] = field(init=False)
    on_next_optimizer: Callable[[Optimizer], None] = field(init=False)
    on_event: Callable[..., None] = field(init=False)
    captured: list[Optimizer] | None = None
    pausing: bool = False
    ended: bool = False
