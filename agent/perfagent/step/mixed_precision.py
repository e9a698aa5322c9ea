"""What a step in mixed precision leaves in the step's state: the scaler's scale, and whether it let the optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfagent.device import Value
    from perfagent.step.trace import Root

__all__ = ["MixedPrecision"]


class MixedPrecision:
    """Written by the hooks of GradScaler and DeepSpeed on the training thread; `skipped` is also counted on the sender's, where
    a fused optimizer skips on its device.

    scaling: a loss was scaled in this step. scaled: id of a scaled loss -> the loss before. unscaled: the gradients are true
    ones again. scaler_scale: the scaler's factor, in the step that it ends. grad_scale: the factor that the gradients still
    carry when a fused optimizer takes them. found_inf: the flag by which a fused optimizer skips, from inside its step to the
    end of the scaler's. skipped: steps so far that the scaler skipped.
    """

    __slots__ = ("found_inf", "grad_scale", "scaled", "scaler_scale", "scaling", "skipped", "unscaled")

    def __init__(self) -> None:
        self.scaling = self.unscaled = False
        self.scaled: dict[int, Root] = {}
        self.scaler_scale: Value | None = None
        self.grad_scale: Value | None = None
        self.found_inf: Any = None
        self.skipped = 0
