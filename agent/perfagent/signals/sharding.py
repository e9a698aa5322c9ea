"""Which part of a sharded model's gradients this rank holds, and how many other ranks hold the same part.

A norm over all ranks is the root of a sum of squares. Every rank sends the sum over what it holds, each parameter's square
divided by the number of ranks that hold the same numbers (an unsharded parameter under FSDP2, the replicated dimension of a
hybrid mesh, a layer norm under tensor parallelism): the server then only adds. No collective is issued, and where the number of
copies cannot be known, nothing is sent.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["copies_of", "local", "world_size", "zero_pieces"]

_PIPELINE = frozenset(("pp", "pipe", "pipeline", "stage"))
"""Dimensions of a mesh along which ranks hold other layers, not copies."""


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor; the tensor itself where it is none."""
    return getattr(tensor, "_local_tensor", tensor)


def world_size() -> int:
    """Ranks of the job; 1 where torch.distributed is not initialized."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())


def copies_of(tensors: Sequence[Any], world: int) -> list[float] | None:
    """For each tensor, how many ranks hold the numbers that this rank holds of it. None where that cannot be known.

    tensors: parameters or gradients, at least one of them a DTensor (or of FSDP's flat parameters).
    """
    sharded = [tensor for tensor in tensors if hasattr(tensor, "device_mesh")]
    if not sharded:
        return None
    together = _holders(max((tensor.device_mesh for tensor in sharded), key=lambda mesh: int(mesh.size())), world)
    if together is None:
        return None
    copies: list[float] = []
    for tensor in tensors:
        if not hasattr(tensor, "device_mesh"):
            copies.append(float(together))
            continue
        mesh, placements = tensor.device_mesh, tensor.placements
        if any(placement.is_partial() for placement in placements):
            return None  # a sum that is not finished: its squares cannot be added
        same = math.prod(int(mesh.size(i)) for i, placement in enumerate(placements) if placement.is_replicate())
        copies.append(together * same / int(mesh.size()))
    return copies


def _holders(mesh: Any, world: int) -> int | None:
    """How many ranks hold one whole set of the parameters of a mesh: all, or those of a pipeline's stage."""
    if int(mesh.size()) == world:
        return world
    root = getattr(mesh, "_get_root_mesh", lambda: None)()
    if root is None or int(root.size()) != world or not root.mesh_dim_names:
        return None
    stages = math.prod(int(root.size(i)) for i, name in enumerate(root.mesh_dim_names) if name in _PIPELINE)
    return world // stages


def zero_pieces(optimizer: Any) -> list[tuple[Any, Any]] | None:
    """(parameter, this rank's piece of its gradient) of DeepSpeed's ZeRO-1, 2 and 3, before its optimizer steps.

    The pieces still carry the loss scale, and no two ranks hold the same one. None where they are kept on the host (offload),
    where groups of ranks hold the same ones (tensor parallelism, MiCS), and for an optimizer that is none of the three.
    """
    pieces = getattr(optimizer, "averaged_gradients", None)
    groups = getattr(optimizer, "params_in_partition", None)  # ZeRO-1 and 2; a list a parameter group
    if groups is None:
        groups = getattr(optimizer, "fp16_groups", None)  # ZeRO-3; a list a sub-group
    counts = getattr(optimizer, "partition_count", None)
    together = set(counts) if isinstance(counts, list) else {counts}
    if not isinstance(pieces, dict) or not groups or together != {world_size()}:
        return None
    found: list[tuple[Any, Any]] = []
    for number, parameters in enumerate(groups):
        mine = pieces.get(number)
        if mine is None:
            return None
        held = [piece for piece in mine if not getattr(piece, "_zero_padding", False)]
        found.extend(zip(parameters, held, strict=False))  # what follows the last parameter is padding, too
    return found
