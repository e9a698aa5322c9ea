"""DeepSpeed: the engine's `step` is the step, its `backward` the backward pass, its gradient norm the norm.

ZeRO steps the optimizer inside once per parameter group, and not at all when the gradients overflow, so the optimizer
hooks are silent inside `engine.step`; a step is over when `engine.global_steps` moves on, at the end of an accumulation
window. Gradients are partitioned and partly gone by then, but DeepSpeed has computed their global norm for itself. What
`engine.backward` returns is the loss divided by the accumulation steps and not yet multiplied by the loss scale.

An engine that steps a plain torch optimizer (stage 0 in full precision) needs the usual hooks, and its clipping watched.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from perfagent.boundary.guard import guarded
from perfagent.integrations import api

if TYPE_CHECKING:
    import torch

    from perfagent.device import Value
    from perfagent.integrations.functions import Patch

__all__ = ["install"]


def install(framework: ModuleType, patch: Patch) -> None:
    """framework: deepspeed.runtime.engine."""
    engine = framework.DeepSpeedEngine
    for owner, name, watch in (
        (engine, "step", _watch_step),
        (engine, "_take_model_step", _watch_step),  # what the pipeline engine calls, which has no step()
        (engine, "backward", _watch_backward),
        (engine, "scale", api.after(_note_scaled)),
        (framework, "clip_grad_norm_", api.after(_note_norm)),
    ):
        if hasattr(owner, name):
            patch(owner, name, watch)


class _Before(NamedTuple):
    """The engine when its step was called."""

    step: api.OpenStep
    steps: int
    skipped: int
    scale: Value | None
    is_measured: bool
    """The shards of the gradients, which carry the scale."""


def _watch_step(original: api.Function) -> api.Function:
    """The optimizer phase where it ends an accumulation window, nothing where it does not."""

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _before(self)
        if before is None:
            return original(self, *args, **kwargs)
        with api.silent_hooks(self.optimizer):
            result = original(self, *args, **kwargs)
        _after(self, before)
        return result

    return step


@guarded
def _before(engine: Any) -> _Before | None:
    optimizer = engine.optimizer
    if optimizer is None or isinstance(optimizer, sys.modules["torch"].optim.Optimizer):
        return None
    step = api.begin_step(optimizer)
    if step is None:
        return None
    is_due = api.are_gradients_due() and engine.is_gradient_accumulation_boundary()
    shards, scale = _shards(optimizer) if is_due else None, _scale(engine)
    if shards:
        api.measure_shards(shards, engine.module, scale)
    return _Before(step, engine.global_steps, engine.skipped_steps, scale, bool(shards))


@guarded
def _after(engine: Any, before: _Before) -> None:
    if engine.global_steps == before.steps:  # within an accumulation window
        api.discard_step(before.step)
        return
    if api.primary_optimizer() in (None, getattr(engine, "basic_optimizer", None)):
        _choose(engine)
    overflowed = engine.skipped_steps > before.skipped
    skipped = overflowed or (None if before.scale is None else False)
    norm = None if overflowed else engine._global_grad_norm
    if before.is_measured and before.scale is not None and norm is not None:
        # both are divided by the scale, and the engine has done so; a scale on a device is not there yet
        norm = norm * before.scale if isinstance(before.scale, float) else None
    api.end_step(before.step, engine.optimizer, skipped=skipped, norm=api.number(norm), scale=before.scale)


def _scale(engine: Any) -> Value | None:
    """The loss scale of this step; None in a precision that needs none."""
    scaler = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    if scaler is not None:
        return api.number(scaler._scale)
    return api.number(engine.optimizer.cur_scale) if engine.fp16_enabled() else None


def _choose(engine: Any) -> None:
    """The engine with most parameters says what a step is (of a generator and its discriminator). One that has made more
    steps than this is left over from an earlier training."""
    kind = sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine
    best, size = engine, api.numbers_trained(engine.optimizer)
    for other in api.instances_of(kind):
        if other.__dict__.get("global_steps", sys.maxsize) <= engine.global_steps:
            optimizer = other.__dict__.get("optimizer")
            if hasattr(optimizer, "param_groups") and api.numbers_trained(optimizer) > size:
                best, size = other, api.numbers_trained(optimizer)
    api.trains(best.optimizer, best)


def _shards(optimizer: Any) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Returns (parameter, this rank's shard of its gradient) of ZeRO-1, 2 and 3, before the optimizer steps.

    The shards still carry the loss scale, and no two ranks hold the same shard. Returns None if they are kept on the
    host (offload), if groups of ranks hold the same shards (tensor parallelism, MiCS), and for any other optimizer.
    """
    pieces = getattr(optimizer, "averaged_gradients", None)
    groups = getattr(optimizer, "params_in_partition", None)  # ZeRO-1 and 2: one list per parameter group
    if groups is None:
        groups = getattr(optimizer, "fp16_groups", None)  # ZeRO-3: one list per sub-group
    counts = getattr(optimizer, "partition_count", None)
    together = set(counts) if isinstance(counts, list) else {counts}
    if not isinstance(pieces, dict) or not groups or together != {api.world_size()}:
        return None
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for place, parameters in enumerate(groups):
        mine = pieces.get(place)
        if mine is None:
            return None
        held = [piece for piece in mine if not getattr(piece, "_zero_padding", False)]
        found.extend(zip(parameters, held, strict=False))  # whatever follows the last parameter is padding, too
    return found


def _watch_backward(original: api.Function) -> api.Function:
    """The reduction of gradients at its end is part of the backward pass."""

    @functools.wraps(original)
    def backward(self: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with api.backward(loss) as begun:
            result = original(self, loss, *args, **kwargs)
            api.loss(begun, result)
        return result

    return backward


def _note_scaled(scaled: torch.Tensor, _engine: object, loss: torch.Tensor) -> None:
    """For loops that call `engine.scale(loss).backward()`."""
    api.scaled_loss(loss, scaled)


def _note_norm(total: torch.Tensor | float, *_: object, **__: object) -> None:
    """The engine's own clipping, which it uses without ZeRO: when the optimizer steps, the gradients are clipped ones."""
    api.add_norm(api.number(total))  # of all the engine's parameters
