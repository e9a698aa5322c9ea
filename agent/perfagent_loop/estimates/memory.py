"""`perfagent.estimate_memory`: the largest amount of memory that a training step holds at once, without running it.

The step is simulated on tensors without contents (live_memory.py). Training with Adam takes 16 to 18 bytes a parameter
before the first activation (Rajbhandari et al., "ZeRO", 2020, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor

from perfagent.errors import ConfigError
from perfagent.step.state import unwatched
from perfagent.wire.quantities import size
from perfagent_loop.checks import check_count
from perfagent_loop.estimates.adapters import Quantization, checked_adapters
from perfagent_loop.estimates.live_memory import PARTS, Moment, Part
from perfagent_loop.estimates.stepping import Plan, Simulated, simulate
from perfagent_loop.kinds import Batch
from perfagent_loop.meta_copy import plain_module
from perfagent_loop.precision import Precision, checked_precision
from perfagent_loop.randomness import random_state, restore_random_state

__all__ = ["MemoryEstimate", "estimate_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The memory of a training step on one rank, in bytes.

    Each part is counted at its own peak, so the parts add up to more than the total.

    Attributes:
        total_bytes: The largest sum of all that is in memory at once, in every step but the first.
        weights_bytes: Weights and buffers, also frozen and quantized ones.
        gradients_bytes: Gradients.
        optimizer_bytes: The optimizer's state, and under ZeRO the float32 masters of a half-precision model.
        activations_bytes: What autograd saves for the backward pass, each tensor once.
        inputs_bytes: The batch.
        at_peak: The parts at the largest moment: weights, gradients, optimizer, inputs, activations with temporaries.
        peak_phase: The phase of the largest moment: forward, backward or optimizer.
        first_step_bytes: The same as `total_bytes`, for the first step.
        parameters: The number of parameters.
        trainable: The number of parameters that are trained.
        device: "cpu" or "cuda", whose allocator and optimizers were assumed.
        measured: True if a copy of the model with real values was used, because the model reads values back.
        notes: What is left out.
    """

    total_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    inputs_bytes: int
    at_peak: dict[str, int]
    peak_phase: str
    first_step_bytes: int
    parameters: int
    trainable: int
    device: str
    measured: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state: what a smaller batch does not save."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def bytes_per_parameter(self) -> float:
        """`state_bytes` for each parameter: 16 with Adam in float32 on one rank."""
        return self.state_bytes / self.parameters if self.parameters else 0.0

    def __str__(self) -> str:
        state = (self.weights_bytes, self.gradients_bytes, self.optimizer_bytes)
        largest = (*state, self.inputs_bytes, self.activations_bytes)
        names = ("weights and buffers", "gradients", "optimizer", "batch", "activations")
        lines = [f"{'':<20}{'at its largest':>16}{'at the peak':>16}"]
        for part, name, most in zip(PARTS, names, largest, strict=True):
            lines.append(f"{name:<20}{size(most):>16}{size(self.at_peak[part]):>16}")
        phase = f"{self.peak_phase} pass" if self.peak_phase != "optimizer" else "optimizer's step"
        lines.append(f"{'peak':<20}{'':>16}{size(self.total_bytes):>16}   in the {phase}")
        trained = "" if self.trainable == self.parameters else f", {self.trainable:,} of them trained"
        weight, gradient, optimizer = (part / max(1, self.parameters) for part in state)
        lines.append(
            f"{self.parameters:,} parameters{trained}: {self.bytes_per_parameter:.2f} bytes each before any activation "
            f"({weight:.2f} weight, {gradient:.2f} gradient, {optimizer:.2f} optimizer)"
        )
        return "\n".join([*lines, *self.notes])


def estimate_memory(
    model: nn.Module,
    batch: Batch,
    *,
    optimizer: Any = "adamw",
    precision: Precision = "fp32",
    zero_stage: int = 0,
    world_size: int = 1,
    checkpointing: bool | str | Callable[..., Any] = False,
    grad_accum: int = 1,
    loss: Callable[[Any, Any], Tensor] | None = None,
    lora: int | None = None,
    lora_targets: Sequence[str] | None = None,
    quantize: Quantization | None = None,
    device: str | torch.device | None = None,
) -> MemoryEstimate:
    """Estimates the memory of a training step without running it. The model does not change.

    Not included: the CUDA context (about 0.5 GB), communication libraries, fragmentation, workspaces of operations.

    Args:
        model: The model before it is sharded. On the meta device, even 70 billion parameters need no memory.
        batch: What the model is called with on one rank: a tensor, a tuple or list (targets last), or a mapping.
        optimizer: Yours, a class or function of parameters, or "adamw", "sgd", "momentum", "adafactor", "adamw8bit".
        precision: That of autocast; with a `zero_stage` also that of the weights, beside float32 masters.
        zero_stage: What is divided over the ranks. 1: optimizer. 2: gradients, too. 3: weights, too, as in FSDP.
        world_size: The number of ranks.
        checkpointing: True, or a `mode` of `checkpoint_activations`.
        grad_accum: Micro-steps of a step; gradients stay between them.
        loss: Computes the loss from output and batch; by default the model's own, or one for the batch's last tensor.
        lora: The rank of adapters. Everything else is frozen.
        lora_targets: The layers with adapters; all linear layers but the last by default.
        quantize: "int8" or "nf4" for the frozen matrices.
        device: "cpu" or "cuda"; the model's by default. For a model on the meta device, CUDA if there is any.

    Raises ConfigError for options that do not fit together, and for a model that is already sharded or quantized.

    Source: Rajbhandari et al., [ZeRO](https://arxiv.org/abs/1910.02054), 2020, section 3.
    """
    checked_precision(precision)
    checked_adapters(lora, quantize)
    if zero_stage not in (0, 1, 2, 3):
        raise ConfigError(f"zero_stage must be 0, 1, 2 or 3, not {zero_stage!r:.60}")
    check_count("world_size", world_size, "a number of ranks")
    check_count("grad_accum", grad_accum, "a number of micro-steps")
    module = plain_module(model)
    target, on_cuda = _device(module, device)
    if lora_targets is not None:
        lora_targets = (lora_targets,) if isinstance(lora_targets, str) else tuple(lora_targets)
    plan = Plan(
        model=module, batch=batch, optimizer=optimizer, precision=precision, zero_stage=zero_stage, checkpointing=checkpointing,
        grad_accum=grad_accum, loss=loss, lora=lora, lora_targets=lora_targets, quantize=quantize, device=target,
        on_cuda=on_cuda,
    )  # fmt: skip
    before = random_state()
    measured = False
    with unwatched():
        try:
            found = simulate(plan)
        except Exception as problem:
            if not isinstance(problem, _NEEDS_VALUES) and _WANTS_NUMPY not in str(problem):
                raise
            if any(parameter.is_meta for parameter in model.parameters()):
                said = (str(problem).strip().splitlines() or [type(problem).__name__])[0][:120]
                raise ConfigError(f"the model reads values back ({said}): pass it on a real device") from None
            measured = True
            found = simulate(plan, real=True)
        finally:
            restore_random_state(before)
    return _estimate(found, plan, world_size, measured=measured)


def _device(model: nn.Module, given: Any) -> tuple[torch.device, bool]:
    """Where it is simulated, and whether as CUDA would do it. A torch without CUDA ends the process when autograd meets
    a tensor that pretends to be on one (seen in 2.13): CUDA is then simulated on the CPU."""
    if given is None:
        kinds = {parameter.device.type for parameter in model.parameters()} - {"meta"}
        given = kinds.pop() if len(kinds) == 1 else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(given).type
    except (RuntimeError, TypeError):
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu or cuda, not {given!s:.60}")
    on_cuda = kind == "cuda"
    return torch.device("cuda" if on_cuda and torch.cuda.is_available() else "cpu"), on_cuda


def _estimate(found: Simulated, plan: Plan, world: int, *, measured: bool) -> MemoryEstimate:
    shares = _Shares(plan.zero_stage, world, found.largest_layer_bytes)
    second = [moment for moment in found.account.moments if moment.step == 2]
    first = [moment for moment in found.account.moments if moment.step == 1]
    peak = max(second, key=lambda moment: sum(shares.of(moment)))
    largest = [max(column) for column in zip(*(shares.of(moment) for moment in second), strict=True)]
    by_part: dict[Part, int] = dict(zip(PARTS, largest, strict=True))
    return MemoryEstimate(
        total_bytes=sum(shares.of(peak)), weights_bytes=shares.weights(found.weights_bytes),
        gradients_bytes=by_part["gradients"], optimizer_bytes=by_part["optimizer"], activations_bytes=found.saved_bytes,
        inputs_bytes=by_part["inputs"], at_peak=dict(zip(PARTS, shares.of(peak), strict=True)), peak_phase=peak.phase,
        first_step_bytes=max(sum(shares.of(moment)) for moment in first), parameters=found.parameters,
        trainable=found.trainable, device="cuda" if plan.on_cuda else "cpu", measured=measured,
        notes=_notes(found, plan, world, measured=measured),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Shares:
    """What of each part one rank holds (ZeRO, table 1), and the layer that stage 3 gathers while it computes."""

    stage: int
    world: int
    gathered_bytes: int

    def weights(self, size: int) -> int:
        return _part_of(size, self.world) if self.stage >= 3 else size

    def of(self, moment: Moment) -> tuple[int, ...]:
        weights, gradients, optimizer, inputs, rest = moment.live
        if self.stage >= 3 and self.world > 1:
            weights = self.weights(weights)
            if moment.phase in ("forward", "backward"):
                # its own part of the layer it has already
                rest += self.gathered_bytes - self.weights(self.gathered_bytes)
        if self.stage >= 2:
            gradients = _part_of(gradients, self.world)
        if self.stage >= 1:
            optimizer = _part_of(optimizer, self.world)
            if moment.phase == "optimizer":  # float32 gradients and temporaries of the parameters that a rank owns
                rest = _part_of(rest, self.world)
        return weights, gradients, optimizer, inputs, rest


def _part_of(size: int, world: int) -> int:
    return -(-size // world)


def _notes(found: Simulated, plan: Plan, world: int, *, measured: bool) -> list[str]:
    kept = f" in {plan.quantize}" if plan.quantize else ""
    notes = (
        (measured, "The model reads values back while it computes: the step was run on a copy, and its tensors were counted."),
        (
            plan.precision != "fp32" and not plan.zero_stage,
            f"Autocast keeps a {plan.precision} copy of a weight until its backward pass: 2 bytes more a parameter.",
        ),
        (
            world > 1 and not plan.zero_stage,
            "DistributedDataParallel adds buckets as large as the gradients, unless gradient_as_bucket_view=True.",
        ),
        (
            plan.zero_stage, f"ZeRO-{plan.zero_stage} over {world} rank{'s' if world > 1 else ''}; DeepSpeed adds its buckets: "
            "reduce_bucket_size numbers in the type of the gradients, twice with overlap_comm.",
        ),
        (found.adapted, f"LoRA of rank {plan.lora} beside {found.adapted} linear layers{kept}; everything else is frozen."),
        (plan.on_cuda, "A CUDA context takes some 0.5 GB more, cuBLAS 8 to 64 MB."),
    )  # fmt: skip
    return [note for there, note in notes if there]


_NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)
_WANTS_NUMPY = ".numpy() is not supported for tensor subclasses"
