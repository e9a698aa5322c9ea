"""DistributedDataParallel with the options that matter, and compressed communication of gradients where it works.

Two of torch's hooks fail without saying why: PowerSGD over gloo hangs in the first backward pass after its warm-up
(pytorch/pytorch issues 58467 and 58882; seen with torch 2.13), the bf16 hook over gloo raises in the middle of a
training. Here both are refused before the first step."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_choice, check_count
from perfagent_loop.collectives import need_group

__all__ = ["HOOKS", "backend_for", "comm_hook", "ddp"]

Hook = Literal["fp16", "bf16", "powersgd", "batched_powersgd", "fp16_powersgd"]
HOOKS: tuple[Hook, ...] = get_args(Hook)


def ddp(
    model: nn.Module,
    *,
    bucket_mb: float = 25.0,
    gradient_as_bucket_view: bool = True,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
    broadcast_buffers: bool = True,
    hook: Hook | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> DistributedDataParallel:
    """DistributedDataParallel with the options that matter for speed and memory.

    Args:
        model: The model, already on the device of this rank.
        bucket_mb: MiB of gradients that are sent together. Larger for a slow network (50, 100), smaller to start
            earlier (10).
        gradient_as_bucket_view: True stores gradients in the buckets, which saves a copy and the memory of all
            gradients.
        static_graph: True if the same parameters get gradients in the same order in every step. Needed to checkpoint a
            layer twice; `find_unused_parameters` then has no effect.
        find_unused_parameters: True if parameters may get no gradient in a step. Costs time.
        broadcast_buffers: True sends rank 0's buffers, such as running statistics, before each forward pass.
        hook: Compression of gradients, as in `comm_hook`.
        process_group: The ranks; all by default.

    Returns:
        The wrapped model.
    """
    need_group()
    if isinstance(model, DistributedDataParallel):
        raise ConfigError("the model is wrapped by DistributedDataParallel already; pass it to perfagent.loop as it is")
    if not bucket_mb > 0:
        raise ConfigError(f"bucket_mb is the size of a bucket of gradients in MiB, above 0; got {bucket_mb!r}")
    if static_graph and find_unused_parameters:
        raise ConfigError("static_graph and find_unused_parameters exclude each other: leave the second out")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError("no parameter of the model requires a gradient: there is nothing to average; do not wrap it")
    devices = {parameter.device for parameter in trained}
    one = next(iter(devices)) if len(devices) == 1 else None
    if hook is not None:
        _check_hook(hook, process_group, trained[0].device)
    # torch renames it, and warns of the name
    buffers: dict[str, Any] = {} if broadcast_buffers else {"broadcast_buffers": False}
    wrapped = DistributedDataParallel(
        model, device_ids=[one] if one is not None and one.type == "cuda" else None, process_group=process_group,
        bucket_cap_mb=bucket_mb, gradient_as_bucket_view=gradient_as_bucket_view, static_graph=static_graph,
        find_unused_parameters=find_unused_parameters, **buffers,
    )  # fmt: skip
    if hook is not None:
        comm_hook(wrapped, hook)
    return wrapped


def comm_hook(
    model: nn.Module,
    hook: Hook,
    *,
    rank: int = 1,
    start_iter: int = 1000,
    min_compression_rate: float = 2.0,
    seed: int = 0,
) -> None:
    """Compresses the gradients of a DistributedDataParallel model on the network. One hook a model, before the
    training.

    Args:
        model: The DistributedDataParallel model.
        hook: "fp16" and "bf16" halve the traffic by rounding. "powersgd" sends low-rank factors with error feedback.
            "batched_powersgd" does so for whole buckets. "fp16_powersgd" also rounds the factors.
        rank: The rank of the factors of PowerSGD.
        start_iter: The step from which PowerSGD compresses.
        min_compression_rate: PowerSGD leaves a gradient alone that it would compress less than this.
        seed: The seed of PowerSGD's random start.

    Raises:
        ConfigError: The hook cannot work here, such as PowerSGD over gloo.

    Source: Vogels et al., [PowerSGD](https://arxiv.org/abs/1905.13727), 2019;
    `torch.distributed.algorithms.ddp_comm_hooks`.
    """
    inner: Any = getattr(model, "_orig_mod", model)
    if not isinstance(inner, DistributedDataParallel):
        raise ConfigError(
            f"communication hooks belong to DistributedDataParallel, not {type(model).__name__}; under FSDP2 say "
            "perfagent.fsdp(model, reduce='bf16'), under DeepSpeed zero_config(..., communication='bf16')"
        )
    _check_hook(hook, inner.process_group, next(inner.parameters()).device)
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook in ("fp16", "bf16"):
        inner.register_comm_hook(inner.process_group, getattr(default_hooks, f"{hook}_compress_hook"))
        return
    check_count("rank", rank, "the rank of the factors (1 to 4 are usual)")
    check_count("start_iter", start_iter, "a number of plain steps (DDP rebuilds its buckets after one)", least=2)
    state = powerSGD_hook.PowerSGDState(inner.process_group, rank, start_iter, min_compression_rate, random_seed=seed)
    chosen: Any = powerSGD_hook.batched_powerSGD_hook if hook == "batched_powersgd" else powerSGD_hook.powerSGD_hook
    if hook == "fp16_powersgd":
        chosen = default_hooks.fp16_compress_wrapper(chosen)
    inner.register_comm_hook(state, chosen)


def _check_hook(hook: Any, group: dist.ProcessGroup | None, device: torch.device) -> None:
    check_choice("hook", hook, HOOKS)
    backend = backend_for(device, dist.get_backend_config(group))
    if hook == "bf16" and backend not in ("nccl", "xccl"):
        raise ConfigError(f"the bf16 hook needs NCCL, and the process group is {backend}; use hook='fp16'")
    if "powersgd" in hook and backend != "nccl":
        raise ConfigError(f"{hook} needs NCCL, and the group is {backend}, over which it hangs; use hook='fp16'")


def backend_for(device: torch.device, config: str) -> str:
    """The backend over which gradients on this device travel. config: of a group, such as "cpu:gloo,cuda:nccl"."""
    by_device = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return by_device.get(device.type, config)
