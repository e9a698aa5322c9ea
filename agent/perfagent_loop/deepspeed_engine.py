"""DeepSpeed's engine: its step at the end of a window, and its part of a checkpoint.

Options that exist in two places and are obeyed in one are the commonest complaint about DeepSpeed behind another
trainer (huggingface/accelerate issues 1970, 3369, 3807). Here they must agree. DeepSpeed unpickles its checkpoints
without restraint; here they are read with weights_only=True and a short list of DeepSpeed's own classes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perfagent.errors import CheckpointError, ConfigError
from perfagent_loop.accumulation import Count
from perfagent_loop.kinds import Engine
from perfagent_loop.precision import checked_precision
from perfagent_loop.stepping import StepResult, moved_by_windows
from perfagent_loop.strategies import DeepSpeed

__all__ = ["EngineStep", "load_engine", "save_engine"]


class EngineStep:
    """Steps a DeepSpeed engine. grad_accum: as the engine's configuration says."""

    under_way = False

    def __init__(
        self,
        strategy: DeepSpeed,
        optimizer: Any,
        scheduler: Any,
        precision: str | None,
        grad_accum: int | None,
        clip_norm: float | None,
    ) -> None:
        engine = self._engine = strategy.engine
        self.grad_accum = int(engine.gradient_accumulation_steps())
        self.optimizer = engine.optimizer
        self._scheduler = None if scheduler is engine.lr_scheduler else moved_by_windows(scheduler)
        if engine.optimizer is None:
            raise ConfigError("the engine has no optimizer: there is nothing to step; pass one to deepspeed.initialize")
        if optimizer is not None and optimizer not in (engine.optimizer, getattr(engine, "basic_optimizer", None)):
            raise ConfigError("the optimizer is not the engine's; pass it to deepspeed.initialize, and leave it out")
        own = strategy.precision
        if precision is not None and checked_precision(precision) != own:
            raise ConfigError(
                f"precision is {precision!r} and the engine computes in {own}: autocast must not be laid over it; leave it out "
                f"here and say zero_config(..., precision={precision!r})"
            )
        if grad_accum is not None and grad_accum != self.grad_accum:
            raise ConfigError(f"grad_accum is not the engine's gradient_accumulation_steps {self.grad_accum}; drop it")
        clips = float(engine.gradient_clipping() or 0.0)
        if clip_norm is not None and float(clip_norm) != clips:
            raise ConfigError(
                f"clip_norm is {clip_norm} and the engine's gradient_clipping {clips}: only the engine can clip gradients that "
                f"lie on many ranks; say zero_config(..., clip_norm={clip_norm})"
            )

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)  # the loop has weighed it

    def clear(self) -> None:
        self._engine.zero_grad()
        self._engine.optimizer.zero_grad(set_to_none=True)

    def step(self, factor: Count | None) -> StepResult:
        if factor is not None:
            raise ConfigError("the window was cut short, and DeepSpeed has averaged its gradients already")
        engine = self._engine
        skipped_before = engine.skipped_steps
        engine.step()
        norm = engine.get_global_grad_norm()
        if norm is not None and not isinstance(norm, Tensor):
            norm = torch.tensor(float(norm))
        skipped = engine.skipped_steps > skipped_before
        if self._scheduler is not None and not skipped:
            self._scheduler.step()
        return StepResult(stepped=True, grad_norm=norm, found_inf=skipped)


_TAG = "engine"


def save_engine(engine: Engine, folder: Path) -> None:
    engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False)


def load_engine(engine: Engine, folder: Path) -> None:
    """Raises CheckpointError where the engine's files are for another one."""
    files = engine.checkpoint_engine
    files.load = _load  # on the object, over its class's method
    try:
        path, _ = engine.load_checkpoint(str(folder), tag=_TAG)
    finally:
        del files.load
    if path is None:
        raise CheckpointError(f"{folder} is whole, but not of this engine: another ZeRO stage or world size?")


def _load(path: str, map_location: Any = None) -> object:
    scalers = importlib.import_module("deepspeed.runtime.fp16.loss_scaler")
    zero = importlib.import_module("deepspeed.runtime.zero.config")
    fragments = importlib.import_module("deepspeed.utils.tensor_fragment")
    own = [scalers.DynamicLossScaler, scalers.LossScaler, zero.ZeroStageEnum, fragments.fragment_address]
    with torch.serialization.safe_globals(own):
        return torch.load(path, map_location=map_location, weights_only=True)
