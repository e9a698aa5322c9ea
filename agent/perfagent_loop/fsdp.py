"""FSDP2 in one call: every repeated block is sharded on its own, then the rest.

Blocks matter: what is one shard is gathered as a whole, so that a model sharded only at its root needs the memory of
all its parameters at once, and cannot overlap the gathering of one layer with the computation of another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from perfagent.errors import ConfigError
from perfagent_loop.collectives import need_group
from perfagent_loop.precision import DTYPES, Precision, checked_precision

__all__ = ["blocks_of", "fsdp"]


def fsdp(
    model: nn.Module,
    *,
    precision: Precision = "fp32",
    reduce: Precision = "fp32",
    blocks: Sequence[type[nn.Module]] | None = None,
    mesh: Any = None,
    reshard_after_forward: bool = True,
    offload: bool = False,
) -> nn.Module:
    """Shards the model over all ranks with FSDP2 (`fully_shard`), block by block. Make the optimizer afterwards.

    Args:
        model: The model.
        precision: Of gathered parameters and of the computation. Shards and optimizer stay in fp32.
        reduce: The precision in which gradients are averaged.
        blocks: Classes of modules that are sharded on their own; the items of every list of like modules by default.
        mesh: A DeviceMesh. All ranks in one dimension by default; two dimensions mean hybrid sharding.
        reshard_after_forward: False keeps gathered parameters for the backward pass: faster, with more memory (like
            ZeRO-2).
        offload: True keeps shards in host memory.

    Returns:
        The same model.
    """
    need_group()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    checked_precision(precision)
    checked_precision(reduce)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError("the model is sharded already; pass it to perfagent.loop as it is")
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if kinds & {torch.float16, torch.bfloat16} and precision != "fp32":
        raise ConfigError(f"the weights are {', '.join(map(str, kinds))} and lose small updates; keep them in float32")
    device = "cuda" if torch.cuda.is_available() and dist.get_backend() != "gloo" else "cpu"
    if offload and device == "cpu":
        raise ConfigError("offload moves shards from a GPU to host memory, and there is no GPU here: leave it out")
    mesh = init_device_mesh(device, (dist.get_world_size(),)) if mesh is None else mesh
    half = precision != "fp32" or reduce != "fp32"
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[precision] if precision != "fp32" else None,
            reduce_dtype=DTYPES[reduce] if half else None,
        ),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    for block in _chosen(model, blocks):
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def _chosen(model: nn.Module, kinds: Sequence[type[nn.Module]] | None) -> list[nn.Module]:
    if kinds is None:
        return blocks_of(model)
    found = [module for module in model.modules() if isinstance(module, tuple(kinds)) and module is not model]
    if not found:
        here = Counter(type(module).__name__ for module in model.modules() if module is not model)
        raise ConfigError(
            f"the model holds no {' or '.join(kind.__name__ for kind in kinds)}; it has "
            f"{', '.join(f'{count} {name}' for name, count in here.most_common(8))}"
        )
    return found[::-1]  # inner ones first, as fully_shard wants it


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The items of the outermost lists of like modules with parameters, such as the layers of a transformer."""
    found: list[nn.Module] = []
    for child in model.children():
        items = [*child.children()] if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        full = all(next(item.parameters(), None) is not None for item in items)
        if full and len(items) > 1 and len(set(map(type, items))) == 1:
            found.extend(items)
        else:
            found.extend(blocks_of(child))
    return found
