"""Holds what mixed precision adds to a step's state: the scaler's scale, and whether the scaler let the
optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfagent.device import Value
    from perfagent.step.trace import Root

__all__ = ["MixedPrecision"]


class MixedPrecision:
    """State written by the hooks of GradScaler and DeepSpeed on the training thread. The sender's thread adds to
    `skipped`, too, where a fused optimizer skips on its device.

    scaling: a loss was scaled in this step.
    scaled: id of a scaled loss -> the loss before scaling.
    unscaled: the gradients are unscaled again.
    scale: the scaler's factor as a tensor, during the scaler's step.
    scaler_scale: the scaler's factor, in the step that it ends.
    grad_scale: the factor that the gradients still carried when they were measured or clipped.
    found_inf: the flag by which a fused optimizer skips, set from inside its step until the end of the scaler's step.
    skipped: the number of steps that the scaler has skipped so far.
    """

    __slots__ = ("found_inf", "grad_scale", "scale", "scaled", "scaler_scale", "scaling", "skipped", "unscaled")

    def __init__(self) -> None:
        self.scaling = self.unscaled = False
        self.scaled: dict[int, Root] = {}
        self.scaler_scale: Value | None = None
        self.grad_scale: Value | None = None
        self.found_inf: Any = None
        self.scale: Any = None
        self.skipped = 0
