"""Brings the gradients of several ranks together: one class for each way, chosen by the type of the model.

A plain module, DistributedDataParallel, FSDP2 (`fully_shard`) and an engine of DeepSpeed differ in when they
communicate, where their gradients lie, and what their state is. All else of the loop is the same for all four."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_module
from perfagent_loop.collectives import all_reduce, world_of_job
from perfagent_loop.kinds import Engine, State

__all__ = ["FSDP2", "Data", "DeepSpeed", "Plain", "Strategy", "device_of", "local_piece", "strategy_of"]

logger = logging.getLogger("perfagent")


class Plain:
    """One rank, or a model whose ranks the loop need not bring together.

    kind: plain, ddp, fsdp2 or deepspeed. model: what the user calls. module: the user's own, without the wrapper.
    world: ranks whose gradients are averaged. reduces_early: gradients are averaged before the window is over, so that
    its counts must be known beforehand."""

    kind = "plain"
    reduces_early = False
    engine: Engine = None
    """DeepSpeed's, else None."""

    def __init__(self, model: nn.Module, module: nn.Module) -> None:
        self.model, self.module = model, module
        self.device = device_of(module)
        self.group: dist.ProcessGroup | None = None
        self.world = 1

    def communicate(self, *, last: bool) -> None:
        """Called before each forward pass. last: the backward pass that follows averages gradients over the ranks."""

    def forget(self) -> None:
        """A window is thrown away: so is what the strategy keeps of its gradients, beside those of the parameters."""

    def total(self, count: Tensor) -> Tensor:
        """The sum of a count over the ranks, on its device; nothing waits for it where the backend is asynchronous."""
        if self.world > 1:
            all_reduce(count, group=self.group)
        return count

    def least(self, number: float) -> float:
        """The smallest of this number on all ranks. Sync; a collective."""
        if self.world == 1:
            return number
        least = torch.full((), float(number), dtype=torch.float64, device=self.device)
        all_reduce(least, op=dist.ReduceOp.MIN, group=self.group)
        return float(least)

    def multiply(self, parameters: Iterable[Tensor], factor: Tensor | float) -> None:
        gradients = [local_piece(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clips to the norm of all gradients of all ranks, and returns it: a number on the device, not waited for."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def state(self, optimizer: torch.optim.Optimizer) -> tuple[State, State]:
        """Of the model and of the optimizer."""
        return self.module.state_dict(), optimizer.state_dict()

    def load(self, optimizer: torch.optim.Optimizer, of_model: State, of_optimizer: State) -> None:
        self.module.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)


class Data(Plain):
    """DistributedDataParallel: no communication except in the last backward pass of a window."""

    kind = "ddp"

    def __init__(self, model: nn.Module, wrapper: DistributedDataParallel) -> None:
        super().__init__(model, wrapper.module)
        self._wrapper = wrapper
        self.group = wrapper.process_group
        self.world = dist.get_world_size(self.group)
        # A static graph is learned in the first backward pass, which torch's reducer wants to communicate in: an
        # assertion in C++ fails otherwise. The average of the first micro-step is averaged once more with the window:
        # it is the same on all ranks.
        self._learns_graph = wrapper.static_graph

    def communicate(self, *, last: bool) -> None:
        # What no_sync() sets: forward reads it, and backward then knows.
        self._wrapper.require_backward_grad_sync = last or self._learns_graph
        self._learns_graph = False


class FSDP2(Plain):
    """`fully_shard`: gradients of a window stay whole on each rank until its last backward pass scatters their sums."""

    kind = "fsdp2"

    def __init__(self, model: nn.Module, module: nn.Module, roots: list[Any]) -> None:
        super().__init__(model, module)
        self._roots, self._communicates = roots, True
        left_out = [name for name, p in module.named_parameters() if p.requires_grad and not hasattr(p, "device_mesh")]
        if left_out:
            raise ConfigError(
                f"the model is sharded but for {', '.join(left_out[:5])}{' ...' if left_out[5:] else ''}, whose gradients nobody "
                "would average over the ranks; call perfagent.fsdp() on the whole model, or freeze them"
            )
        sharded = next((p for p in module.parameters() if hasattr(p, "device_mesh")), None)
        mesh: Any = getattr(sharded, "device_mesh", None)
        # With more dimensions (hybrid, tensor parallel) the whole world: a rank's copies count alike above and below
        # the line.
        self.group = mesh.get_group() if mesh is not None and mesh.ndim == 1 else None
        self.world = dist.get_world_size(self.group)

    def communicate(self, *, last: bool) -> None:
        if last is not self._communicates:
            self._communicates = last
            for root in self._roots:
                root.set_requires_gradient_sync(last)

    def forget(self) -> None:
        for root in self._roots:
            for parameter in _held_by(root):
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return torch.zeros((), device=self.device)
        by_mesh: dict[Any, list[Tensor]] = {}
        for gradient in gradients:
            by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
        # by the module's own name, which is what the agent watches to know the gradients before they are clipped
        # a collective, on every rank
        norms: list[Any] = [clip_grad._get_total_norm(of_mesh) for of_mesh in by_mesh.values()]
        norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
        norm: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        torch._foreach_mul_([local_piece(g) for g in gradients], torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def state(self, optimizer: torch.optim.Optimizer) -> tuple[State, State]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        of_model, of_optimizer = get_state_dict(self.module, optimizer)
        return of_model, dict(of_optimizer)

    def load(self, optimizer: torch.optim.Optimizer, of_model: State, of_optimizer: State) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(self.module, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)


class DeepSpeed(Plain):
    """DeepSpeed's engine: it holds the optimizer, scales fp16, clips and steps. Windows end where the loop says.

    ZeRO-2 and 3 average the gradients of every micro-step at once. The state is saved by `engine.save_checkpoint`."""

    kind = "deepspeed"
    reduces_early = True

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        super().__init__(model, engine.module)
        self.engine = engine
        self.device = torch.device(engine.device)
        self.group = engine.data_parallel_group
        self.world = int(engine.dp_world_size)

    def communicate(self, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)

    def state(self, *_: Any) -> tuple[State, State]:
        raise ConfigError("an engine's state lies in pieces on all ranks: save it with engine.save_checkpoint on each")

    load: Any = state

    @property
    def precision(self) -> str:
        engine = self.engine
        if engine.torch_autocast_enabled():
            return "fp16" if engine.torch_autocast_dtype() == torch.float16 else "bf16"
        return "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32"


Strategy = Plain


def strategy_of(model: Any) -> Strategy:
    """The strategy for a model as the user wrapped it. Raises ConfigError for a type that the loop cannot train."""
    check_module(model)
    engine_module = sys.modules.get("deepspeed.runtime.engine")
    if engine_module is not None and isinstance(model, engine_module.DeepSpeedEngine):
        if not hasattr(type(model), "set_gradient_accumulation_boundary") or type(model).__name__ == "PipelineEngine":
            raise ConfigError("a pipeline engine has its own loop: call engine.train_batch(), and perfagent.attach()")
        return DeepSpeed(model, model)
    inner: Any = getattr(model, "_orig_mod", model)  # what torch.compile(model) wraps
    if isinstance(inner, DistributedDataParallel):
        return Data(model, inner)
    roots = _sharded_roots(inner)
    if roots:
        return FSDP2(model, inner, roots)
    _refuse_others(inner)
    return Plain(model, inner)


def _sharded_roots(module: nn.Module) -> list[Any]:
    """The outermost modules that fully_shard was called on."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return []
    if isinstance(module, fsdp.FSDPModule):
        return [module]
    return [root for child in module.children() for root in _sharded_roots(child)]


def _held_by(root: nn.Module) -> Iterator[Any]:
    """fully_shard's own record of each parameter, which holds the gradients that no rank has been given yet."""
    modules: Iterable[Any] = root.modules()
    for module in modules:
        if hasattr(module, "_get_fsdp_state"):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # one group before torch 2.13
            for group in [state._fsdp_param_group] if groups is None else groups:
                yield from () if group is None else group.fsdp_params


def _refuse_others(module: nn.Module) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for inner in module.modules():
        if isinstance(inner, (DistributedDataParallel, nn.DataParallel)):
            raise ConfigError(f"the model holds a {type(inner).__name__} inside; wrap the whole model")
        if fsdp is not None and isinstance(inner, fsdp.FullyShardedDataParallel):
            raise ConfigError("the model is wrapped by FSDP1, which torch has replaced; use perfagent.fsdp(model)")
    if world_of_job() > 1 and not any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
        logger.warning(
            "perfagent: %d ranks train, but the model is not wrapped: each trains a model of its own; "
            "perfagent.ddp(model), perfagent.fsdp(model) or deepspeed.initialize brings them together", world_of_job(),
        )  # fmt: skip


def device_of(model: nn.Module) -> torch.device:
    """Of the first parameter; the CPU without one."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def local_piece(tensor: Tensor) -> Tensor:
    """This rank's piece of a sharded tensor; a plain one as it is."""
    piece: Tensor = getattr(tensor, "_local_tensor", tensor)
    return piece
