"""Handles a step whose gradients hold NaN or Inf: leave it out, go back, or go on more slowly.

The gradients are looked at before the optimizer uses them, so the weights stay good. All ranks decide alike: gradients
that were averaged are the same on each, and of sharded ones the ranks put their findings together. The batches that did
it are passed over, as in Chowdhery et al., "PaLM" (2022), section 5.1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from perfagent.errors import ConfigError, PerfagentError
from perfagent_loop.checks import check_choice, check_count
from perfagent_loop.events import count, tell
from perfagent_loop.stepping import StepResult
from perfagent_loop.strategies import local_piece

if TYPE_CHECKING:
    from perfagent_loop.loop import Loop

__all__ = ["NanPolicy", "NonFiniteGradients", "all_finite"]

Action = Literal["skip", "rollback", "lower_lr"]
SAVED_ONCE_IN = 100
"""Optimizer steps between two checkpoints whose reason is NaN."""


class NonFiniteGradients(PerfagentError):  # noqa: N818 - it says what was found
    """Gradients were not finite in too many windows in a row, so that leaving them out does not help."""


class NanPolicy:
    """Protects the weights from gradients with NaN or Inf: call `policy.step(loop)` instead of `loop.step()`.

    Reads one number from the device in each step. A loop with a checkpoint saves at the first such step, at most once
    in 100 steps.

    Args:
        action: "skip" discards the gradients of the step. "lower_lr" also multiplies every learning rate by `factor`.
            "rollback" also loads weights, optimizer, scheduler and scaler of the newest complete checkpoint.
        most: How many steps in a row may be discarded before an error is raised.
        factor: The factor of "lower_lr".

    Raises:
        ConfigError: The loop uses fp16, whose scaler skips such steps by itself, or DeepSpeed.

    Source: skipping the batches after a rollback, as in Chowdhery et al., [PaLM](https://arxiv.org/abs/2204.02311),
    2022, section 5.1.
    """

    def __init__(self, action: Action = "skip", *, most: int = 5, factor: float = 0.5) -> None:
        check_choice("action", action, get_args(Action))
        check_count("most", most, "a number of windows in a row")
        if not isinstance(factor, (int, float)) or not 0.0 < factor < 1.0:
            raise ConfigError(f"factor is what learning rates are multiplied by, between 0 and 1, not {factor!r:.80}")
        self._action, self._most, self._factor = action, most, float(factor)
        self._row = 0
        self._saved_at: int | None = None
        self.total = 0
        """Windows thrown away so far."""

    def step(self, loop: Loop) -> StepResult:
        """`loop.step()`, or the chosen action. Then the result says that nothing was stepped."""
        self._check(loop)
        window = loop._window
        if not window.done or window.done < window.end:
            return loop.step()
        if all_finite(loop):
            self._row = 0
            return loop.step()
        self._row += 1
        self.total += 1
        self._act(loop)
        return StepResult(stepped=False)

    def _check(self, loop: Loop) -> None:
        if loop.scaler is not None:
            raise ConfigError("the scaler of precision='fp16' leaves out such steps itself; call loop.step()")
        if loop.strategy.kind == "deepspeed":
            raise ConfigError("DeepSpeed's engine steps by itself; watch result.grad_norm instead")
        if self._action == "rollback" and not hasattr(loop.checkpoint, "roll_back"):
            raise ConfigError("action='rollback' needs something to go back to: give the loop a checkpoint")

    def _act(self, loop: Loop) -> None:
        loop.pass_over_window()
        done = f"the gradients after step {loop.step_count} are not finite and were thrown away"
        checkpoint: Any = loop.checkpoint
        due = self._saved_at is None or loop.step_count - self._saved_at >= SAVED_ONCE_IN
        if due and self._row == 1 and hasattr(checkpoint, "save_loop") and self._action != "rollback":
            self._saved_at = loop.step_count
            checkpoint.save_loop(loop, reason="nan")
        if self._row > self._most:
            advice = "look at the data, lower the learning rate, or resume from an older checkpoint"
            raise NonFiniteGradients(f"{done}, as in the {self._most} windows before; {advice}")
        if self._action == "lower_lr":
            scale_learning_rates(loop.optimizer, loop.scheduler, self._factor)
            done += f"; learning rates are multiplied by {self._factor:g}"
        if self._action == "rollback":
            step = checkpoint.roll_back(loop)
            done += "; there is no checkpoint yet" if step is None else f"; the weights of step {step} are back"
        tell("non-finite gradients", done)
        count("recovery/nonfinite", float(self.total))


def all_finite(loop: Loop) -> bool:
    """Whether all gradients of all ranks are finite; the same answer on every rank. Waits for the device."""
    parameters = [p for group in loop.optimizer.param_groups for p in group["params"] if p.grad is not None]
    strategy, good = loop.strategy, True
    if parameters:
        norms = torch._foreach_norm([local_piece(p.grad) for p in parameters], float("inf"))
        good = bool(torch.stack([norm.to(strategy.device) for norm in norms]).isfinite().all())  # sync
    return bool(strategy.least(good)) if strategy.kind == "fsdp2" else good


def scale_learning_rates(optimizer: torch.optim.Optimizer, scheduler: Any, factor: float) -> None:
    """Multiplies the learning rate of every group, and what the scheduler will derive the next ones from."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(factor)
        else:
            group["lr"] *= factor
        for name in ("initial_lr", "max_lr", "min_lr"):  # the last two are OneCycleLR's
            if name in group:
                group[name] = group[name] * factor
    for one in _all_of(scheduler):
        for name in ("base_lrs", "max_lrs"):  # CyclicLR has both
            if hasattr(one, name):
                setattr(one, name, [lr * factor for lr in getattr(one, name)])


def _all_of(scheduler: Any) -> Iterator[Any]:
    """A scheduler, those that it is made of, and so on."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _all_of(inner)
