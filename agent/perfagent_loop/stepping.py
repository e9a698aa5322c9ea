"""The end of a window with a torch optimizer: unscale, correct, clip, step, update the scale, clear, schedule.

The order matters: clipping before unscaling clips to the loss scale, and after the step it does nothing."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import Optimizer

from perfagent.errors import ConfigError
from perfagent_loop.accumulation import Count
from perfagent_loop.checks import wanted_by_step
from perfagent_loop.strategies import Strategy

__all__ = ["OptimizerStep", "StepResult", "moved_by_windows"]


class StepResult:
    """What `loop.step()` and `policy.step()` return.

    Attributes:
        stepped: True if the optimizer stepped and `step_count` increased; False in the other micro-steps.
        grad_norm: The norm of all gradients before clipping: a tensor, so that `float(result.grad_norm)` waits for the
            device. None if nothing is clipped.
    """

    __slots__ = ("_found_inf", "grad_norm", "stepped")
    WAITING: ClassVar[StepResult]
    """Of a micro-step that ends no window."""

    def __init__(self, *, stepped: bool, grad_norm: Tensor | None = None, found_inf: Tensor | bool = False) -> None:
        self.stepped, self.grad_norm, self._found_inf = stepped, grad_norm, found_inf

    @property
    def skipped(self) -> bool:
        """True if the scaler skipped the step because gradients were not finite. Waits for the device if the optimizer
        is fused."""
        return bool(self._found_inf)

    def __repr__(self) -> str:
        return f"StepResult(stepped={self.stepped}, grad_norm={'not read' if self.grad_norm is not None else None})"


StepResult.WAITING = StepResult(stepped=False)


class OptimizerStep:
    """Steps a torch optimizer over the gradients of one window.

    under_way: from the optimizer's first change of a weight until the loop has counted the step."""

    def __init__(
        self,
        strategy: Strategy,
        optimizer: Optimizer,
        scheduler: Any,
        scaler: torch.amp.GradScaler | None,
        clip_norm: float | None,
    ) -> None:
        self._strategy, self._optimizer, self._scaler = strategy, optimizer, scaler
        self._scheduler = moved_by_windows(scheduler)
        self.under_way = False
        self._clip_norm = None if clip_norm is None else float(clip_norm)
        self._simple = scaler is None and clip_norm is None
        self._ran = False
        if scaler is not None:
            optimizer.register_step_post_hook(lambda *_: setattr(self, "_ran", True))

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clear(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._strategy.forget()

    def step(self, factor: Count | None) -> StepResult:
        """factor: of all gradients, where the window's counts were not known beforehand."""
        result = _STEPPED
        if self._simple and factor is None:
            self.under_way = True
            self._optimizer.step()
        else:
            result = self._careful(factor)
        self._optimizer.zero_grad(set_to_none=True)
        if self._scheduler is not None and (result is _STEPPED or result._found_inf is not True):
            self._scheduler.step()
        return result

    def _careful(self, factor: Count | None) -> StepResult:
        scaler, norm = self._scaler, None
        if factor is not None or self._clip_norm is not None:  # else the scaler or a fused optimizer unscales
            if scaler is not None:
                scaler.unscale_(self._optimizer)
            parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
            if factor is not None:
                self._strategy.multiply(parameters, factor)
            if self._clip_norm is not None:
                norm = self._strategy.clip(parameters, self._clip_norm)
        self.under_way = True
        if scaler is None:
            self._optimizer.step()
            return StepResult(stepped=True, grad_norm=norm)
        self._ran = False
        scaler.step(self._optimizer)
        found_inf: Tensor | bool = not self._ran
        if self._ran and getattr(self._optimizer, "_step_supports_amp_scaling", False):
            # a fused optimizer skips in its kernel: only the device knows, and it is not asked here
            found = [*scaler._found_inf_per_device(self._optimizer).values()]
            found_inf = sum(one.to(found[0].device, non_blocking=True) for one in found) if found else False
        scaler.update()
        return StepResult(stepped=True, grad_norm=norm, found_inf=found_inf)


_STEPPED = StepResult(stepped=True)


def moved_by_windows(scheduler: Any) -> Any:
    """The scheduler that the end of a window moves. None for one that wants a metric, which the user steps.

    Raises ConfigError for what has no step() that can be called once an optimizer step.
    """
    if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
        return None
    if not callable(getattr(scheduler, "step", None)):
        raise ConfigError(f"scheduler must have a step(), and {type(scheduler).__name__} has none")
    wanted = wanted_by_step(scheduler)
    if wanted:
        raise ConfigError(f"the step() of {type(scheduler).__name__} wants {wanted}: call it after loop.step()")
    return scheduler
