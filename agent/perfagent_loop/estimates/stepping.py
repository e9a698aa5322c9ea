"""The simulated training step: forward pass, loss, backward pass, optimizer, twice; later ones are as the second.

In the first step the optimizer has no state yet: it makes it when the activations are gone already. A size that
survives one step can therefore still fail in the next."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from perfagent.errors import ConfigError
from perfagent_loop.compute.activation import checkpoint_activations
from perfagent_loop.data.transfer import tensors_in
from perfagent_loop.estimates.adapters import Quantization, add_lora
from perfagent_loop.estimates.live_memory import CUDA_BLOCK, Account
from perfagent_loop.estimates.optimizers import optimizer_for
from perfagent_loop.kinds import Batch
from perfagent_loop.meta_copy import Twin
from perfagent_loop.precision import DTYPES, Precision, autocast_of

__all__ = ["Plan", "Simulated", "call", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be simulated: see `estimate_memory`."""

    model: nn.Module
    batch: Batch
    optimizer: Any
    precision: Precision
    zero_stage: int
    checkpointing: bool | str | Callable[..., Any]
    grad_accum: int
    loss: Callable[[Any, Any], Tensor] | None
    lora: int | None
    lora_targets: tuple[str, ...] | None
    quantize: Quantization | None
    device: torch.device
    on_cuda: bool


@dataclass(frozen=True, slots=True)
class Simulated:
    """The books of the two steps, and what the model came to. parameters: of the model as given, and of the adapters.
    saved_bytes: held by autograd when the forward pass of the second step is over."""

    account: Account
    parameters: int
    trainable: int
    weights_bytes: int
    saved_bytes: int
    largest_layer_bytes: int
    adapted: int


def simulate(plan: Plan, *, real: bool = False) -> Simulated:
    """Runs two steps over a copy of everything. real: with contents, which takes the memory that it counts."""
    twin = Twin(plan.device, real=real)
    account = Account(block=CUDA_BLOCK if plan.on_cuda else 1)
    half = plan.zero_stage > 0 and plan.precision != "fp32"
    dtype = DTYPES[plan.precision] if half else None
    with twin.mode or nullcontext(), account:
        with account.making("weights"):
            model = twin.module(plan.model, dtype)
        adapted: list[str] = []
        if plan.lora is not None:
            adapted = add_lora(model, plan.lora, plan.lora_targets, plan.quantize, account)
            twin.forget()  # what was quantized is gone
        if plan.checkpointing is not False:
            checkpoint_activations(model, "all" if plan.checkpointing is True else plan.checkpointing)
        with account.making("inputs"):
            batch = twin.batch(plan.batch, dtype)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trainable:
            raise ConfigError("no parameter of the model requires a gradient: unfreeze some, or use lora=8")
        with _Step(plan, account, model, batch, twin) as step:
            step.run(1)
            saved = step.run(2)
        weights = account.live("weights")
        layers = [sum(p.nbytes for p in module.parameters(recurse=False)) for module in model.modules()]
    trained = sum(p.numel() for p in trainable)
    parameters = sum(p.numel() for p in plan.model.parameters()) + (trained if adapted else 0)
    return Simulated(account, parameters, trained, weights, saved, max(layers), len(adapted))


class _Step(ExitStack):
    """One step over the copies, entered into the books phase by phase. On leaving, its hooks are taken off the
    parameters: a hook that leads back to its parameter is a cycle which the garbage collector does not see."""

    def __init__(self, plan: Plan, account: Account, model: nn.Module, batch: Batch, twin: Twin) -> None:
        super().__init__()
        self._plan, self._account, self._model, self._batch = plan, account, model, batch
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        with account.making("optimizer"):
            if plan.zero_stage:
                self._masters = {p: nn.Parameter(torch.empty_like(p, dtype=torch.float32)) for p in trainable}
                twin.instead(self._masters)
            of = [self._masters.get(parameter, parameter) for parameter in trainable]
            self._optimizer = optimizer_for(plan.optimizer, of, twin, fresh=plan.lora is not None)
        if plan.on_cuda:
            _several_at_once(self._optimizer)
        for parameter in trainable:
            handle = parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
            self.callback(handle.remove)

    def run(self, number: int) -> int:
        """Answers what the last forward pass left behind for the backward pass, in bytes."""
        account = self._account
        account.step = number
        saved = 0
        for _ in range(self._plan.grad_accum):
            account.phase = "forward"
            precision: Precision = "fp32" if self._plan.zero_stage else self._plan.precision
            with autocast_of(precision, self._plan.device) or nullcontext():
                loss = call(self._model, self._batch, self._plan.loss)
            saved = account.live("activations")
            account.phase = "backward"
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
        account.phase = "optimizer"
        self._update()
        return saved

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._account.belongs(parameter.grad, "gradients")

    def _update(self) -> None:
        """DeepSpeed steps float32 masters of what a rank owns; without ZeRO the weights themselves are stepped."""
        for parameter, master in self._masters.items():
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        self._optimizer.step()
        for state in self._optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self._account.belongs(value, "optimizer")
        with torch.no_grad():
            for parameter, master in self._masters.items():
                parameter.copy_(master)
        self._optimizer.zero_grad(set_to_none=True)
        self._model.zero_grad(set_to_none=True)


def call(model: nn.Module, batch: Batch, loss: Callable[[Any, Any], Tensor] | None) -> Tensor:
    """The loss of a batch: a mapping gives keyword arguments, a list or tuple as many arguments as the model takes."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, (list, tuple)):
        output = model(*batch[: _taken(model, len(batch))])
    else:
        output = model(batch)
    found = loss(output, batch) if loss is not None else _loss_of(output, batch)
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ConfigError(f"the loss must be one number with a gradient, not {what}; pass loss=lambda out, batch: ...")
    return found


def _taken(model: nn.Module, given: int) -> int:
    """How many of the batch's tensors the forward pass takes; the rest are targets."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return given
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return given
    places = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = sum(one.default is one.empty for one in places)
    return min(given, len(places)) if needed >= given or len(places) < given else max(needed, 1)


def _loss_of(output: Any, batch: Batch) -> Tensor:
    """The output's own loss; else by the targets that come last in the batch; else the mean."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    tensors = [one for one in tensors_in(output) if one.is_floating_point() and one.requires_grad]
    if not tensors:
        raise ConfigError("the model's output has no tensor with a gradient; pass loss=lambda output, batch: ...")
    scalars = [one for one in tensors if one.numel() == 1]
    if scalars:
        return scalars[0]
    first = tensors[0]
    target = batch[-1] if isinstance(batch, (list, tuple)) and len(batch) > 1 else None
    if isinstance(target, Tensor):
        if target.shape == first.shape and target.is_floating_point():
            return functional.mse_loss(first, target)
        if target.dtype == torch.int64 and first.shape[:-1] == target.shape:
            return functional.cross_entropy(first.flatten(0, -2), target.flatten())
        if target.dtype == torch.int64 and (first.shape[0], *first.shape[2:]) == tuple(target.shape):
            return functional.cross_entropy(first, target)
    return first.float().mean()


def _several_at_once(optimizer: torch.optim.Optimizer) -> None:
    """On CUDA torch's optimizers treat all parameters at once by default, which takes a temporary of all of them."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
