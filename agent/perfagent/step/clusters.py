"""The parts of a step's state that one subject needs, and not every hook in every step.

Unless another is named, a field is written by the training thread alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfagent.device import Reading, Value
    from perfagent.step.governor import Governor
    from perfagent.step.roles import GradientReport, GradientSchedule, JointStep, LoopAccount, Measured, StepReader
    from perfagent.step.row import Extra

__all__ = [
    "GradientMeasurement", "LossState", "OptimizerSelection", "OverheadCounters", "PhaseState", "RunLinks", "StepCounting",
]  # fmt: skip


@dataclass(slots=True)
class OptimizerSelection:
    """Which optimizer's steps count.

    primary: weak reference to the optimizer that owns most parameters; began: `completed` when it became that.
    alone_since: `completed` at its first step, which may have been known late.
    newcomer: id of an optimizer that appeared while the primary one stepped alone.
    looks, look_at: searches for another model so far; the time (ns) of the next search.
    steppers: id of another optimizer -> `completed` then, its steps since, and the learning rates of those steps.
    beside: id -> weak reference to another optimizer that stepped; the newest few.
    overtaken: id of the optimizer that this one replaced over the same parameters, and `completed` then.
    take_turns: two over the same parameters step in turn: no stages.
    model_size: number of trainable parameters of the model that the script named.
    found: weak reference to the model that was found.
    """

    primary: Any = None
    began: int = -1
    alone_since: int = -1
    newcomer: int = 0
    looks: int = 0
    look_at: int = 0
    steppers: dict[int, tuple[int, int, list[float | None]]] = field(default_factory=dict)
    beside: dict[int, Any] = field(default_factory=dict)
    overtaken: tuple[int, int] = (0, 0)
    take_turns: bool = False
    blocked: int = 0
    model_size: int = 0
    found: Any = None


@dataclass(slots=True)
class GradientMeasurement:
    """What is measured of the gradients of the step in progress.

    moved: how far the step moved the weights.
    extras: other measurements of this step; whoever adds one sets `unusual`.
    looked: the step's gradients were measured inside of its closure.
    without_gradient: measurements in a row at which no parameter of the primary optimizer had a gradient.
    clip_rounds: clipping rounds in the step before, with a backward pass between them.
    """

    clip_norm: list[Value] = field(default_factory=list)
    clip_rounds: int = 0
    moved: Measured | None = None
    extras: list[Extra] = field(default_factory=list)
    looked: bool = False
    without_gradient: int = 0


@dataclass(slots=True)
class OverheadCounters:
    """What the hooks have cost the training so far.

    clipped, clipped_gradients: calls that clip, and their gradients. pass_ns: measuring gradients.
    By the sender's thread: telling_ns: reporting those; device_ns: device time that the measurements added; hooks_ns: all
    other costs.
    """

    clipped: int = 0
    clipped_gradients: int = 0
    pass_ns: int = 0
    telling_ns: float = 0.0
    device_ns: float = 0.0
    hooks_ns: float = 0.0


@dataclass(slots=True)
class StepCounting:
    """How calls of log() get their steps before an optimizer has stepped.

    first_logged: length of the trace at the first call between backward passes, before any optimizer has stepped.
    by_log: no optimizer ever steps, so each log() is a step; None: not decided.
    captures: whether values of the script's other loggers are recorded; captured_step: the highest step of theirs that was
        sent before an optimizer's first.
    """

    early_step: int = 0
    first_logged: int = -1
    by_log: bool | None = None
    captures: bool = False
    captured_step: int = 0
    fetched: bool = False


@dataclass(slots=True)
class LossState:
    """What is known of the losses of the step in progress.

    accumulates: several backward passes a step; assumed until the first step is over.
    user_losses: step -> logged "loss", until the sender's thread takes it.
    whole_loss: `completed` and trace length at the last loss with folded parts (hooks/backward.py).
    loss_made: of what the loss is made (signals/loss_function.py), once it is known.
    proof: gets the root of the next backward pass (hooks/forward.py).
    arriving: the newest loss of this step, on its way from a device.
    parts_for: calls of the model whose input may be a part of a batch (hooks/forward.py).
    """

    accumulates: bool = True
    seen_backward: bool = False
    inside_roots: bool = False
    user_losses: dict[int, float] = field(default_factory=dict)
    whole_loss: tuple[int, int] = (-1, 0)
    loss_made: dict[str, Any] | None = None
    proof: Callable[[Any], None] | None = None
    arriving: Reading | None = None
    parts_for: int = 0


@dataclass(slots=True)
class PhaseState:
    """inside: the part of the loop that a Span times now, by its name.
    told_phases: name -> monotonic time (s) and step of its last event. Also by the sender's thread."""

    inside: str = ""
    told_phases: dict[str, tuple[float, int]] = field(default_factory=dict)


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
    account: LoopAccount
    health: GradientSchedule
    gradient_report: GradientReport
    together: JointStep
    investigator: Any = None
    on_first_step: Callable[[Any], None] | None = None
    on_resumed: Callable[[int], None] | None = None
    on_next_model: Callable[[bool], None] | None = None
    on_next_optimizer: Callable[[Any], None] | None = None
    on_event: Callable[..., None] | None = None
    captured: list[Any] | None = None
    pausing: bool = False
    ended: bool = False
