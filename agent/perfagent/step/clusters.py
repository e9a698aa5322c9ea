"""The parts of a step's state that one subject needs, and not every hook in every step.

Unless another is named, a field is written by the training thread alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weakref import ReferenceType

    import torch

    from perfagent.device import Reading, Value
    from perfagent.step.gradients import Deferred, WeightChanges
    from perfagent.step.trace import Loss

__all__ = [
    "GradientMeasurement", "LoopFacts", "LossState", "MixedPrecision", "OverheadCounters", "PhaseState", "StepCounting",
]  # fmt: skip


@dataclass(slots=True)
class GradientMeasurement:
    """Measurements of the gradients of the step in progress.

    clipped_scaled: the gradients were clipped before `GradScaler.unscale_`.
    moved: how far the step moved the weights.
    deferred: other measurements of this step; whoever adds one sets `unusual`.
    in_closure: the step's gradients were measured inside of its closure.
    without_gradient: measurements in a row at which no parameter of the primary optimizer had a gradient.
    planned_ns: expected cost of the next pass, on all threads and the device. aligned: its step is one that all ranks have
        in common.
    By the sender's thread: beyond_ns: how much longer the last pass took on the device than on the training thread; suspects:
        places of parameters whose NaN and Inf are to be counted in the next pass.
    """

    clip_norm: list[Value] = field(default_factory=list)
    clipped_scaled: bool = False
    moved: WeightChanges | None = None
    deferred: list[Deferred] = field(default_factory=list)
    in_closure: bool = False
    without_gradient: int = 0
    planned_ns: float = 0.0
    aligned: bool = False
    beyond_ns: float = 0.0
    suspects: Sequence[int] = ()


@dataclass(slots=True)
class MixedPrecision:
    """State written by the hooks of GradScaler and DeepSpeed. The sender's thread adds to `skipped`, too, where a fused
    optimizer skips on its device.

    scaling: a loss was scaled in this step. scaled: id of a scaled loss -> the loss before scaling.
    unscaled: the gradients are unscaled again.
    scale: the scaler's factor as a tensor, during the scaler's step; scaler_scale: in the step that it ends.
    grad_scale: the factor that the gradients still carried when they were measured or clipped.
    found_inf: the flag by which a fused optimizer skips, set from inside its step until the end of the scaler's step.
    skipped: the number of steps that the scaler has skipped so far.
    """

    scaling: bool = False
    scaled: dict[int, Loss] = field(default_factory=dict)
    unscaled: bool = False
    scale: torch.Tensor | None = None
    scaler_scale: Value | None = None
    grad_scale: Value | None = None
    found_inf: torch.Tensor | None = None
    skipped: int = 0


@dataclass(slots=True)
class OverheadCounters:
    """What the hooks have cost the training so far.

    clipped, clipped_gradients: calls that clip, and their gradients. pass_ns: measuring gradients. batches_ns: looking into
        batches.
    By the sender's thread: report_ns: reporting those; device_ns: device time that the measurements added; hooks_ns: all
    other costs.
    """

    clipped: int = 0
    clipped_gradients: int = 0
    pass_ns: int = 0
    batches_ns: int = 0
    report_ns: float = 0.0
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
    """State of the losses of the step in progress.

    accumulates: several backward passes a step; assumed until the first step is over.
    user_losses: step -> logged "loss", until the sender's thread takes it.
    loss_made: of what the loss is made (measure/loss_function.py), once it is known.
    proof: gets the root of the next backward pass (measure/clearing.py).
    arriving: the newest loss of this step, on its way from a device; is_late: it, or the one before, had not come
        before the update; inputs: what the model was called with, where it is so.
    parts_for: calls of the model whose input may be a part of a batch (hooks/forward.py).
    """

    accumulates: bool = True
    seen_backward: bool = False
    inside_closure: bool = False
    user_losses: dict[int, float] = field(default_factory=dict)
    loss_made: dict[str, Any] | None = None
    proof: Callable[[Any], None] | None = None
    arriving: Reading | None = None
    is_late: bool = False
    inputs: dict[str, ReferenceType[Any]] = field(default_factory=dict)
    parts_for: int = 0


@dataclass(slots=True)
class LoopFacts:
    """What is known of the loop. By the sender's thread: averages, micro_batches.

    averages: several undivided losses of a step are averaged; None until known.
    micro_batches: the number of them by which the script divides the losses of a full window; 0.0: not known.
    divided_later: the script divides the gradients of a step by the number of its losses, after all backward passes.
    embedded: the model has an embedding, so that integer matrices are tokens.
    watched_from: the step from which calls without gradients are seen: a few that begin then are the step's own.
    """

    averages: bool | None = None
    micro_batches: float = 0.0
    divided_later: bool = False
    embedded: bool = False
    watched_from: int = -3


@dataclass(slots=True)
class PhaseState:
    """inside: the part of the loop that a Span times now, by its name.
    reported: name -> monotonic time (s) and step of its last event. Also by the sender's thread."""

    inside: str = ""
    reported: dict[str, tuple[float, int]] = field(default_factory=dict)
