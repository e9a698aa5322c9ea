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
from typing import Any, NamedTuple

from perfagent.signals.flat_shards import flat_copies, is_flat

__all__ = ["Held", "held", "local", "world_size", "zero_pieces"]

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


class Held(NamedTuple):
    """Who holds the parts of some tensors.

    copies: for each, how many ranks hold the numbers that this rank holds of it; None where that cannot be known. together: how
    many ranks hold all that is not sharded; None likewise.
    """

    copies: list[float] | None
    together: int | None


_UNKNOWN = Held(None, None)


def held(tensors: Sequence[Any], world: int, model: Any = None) -> Held | None:
    """Who holds the parts of these parameters; None where none of them is sharded.

    model: what they belong to, as far as that is known; by it, parameters of FSDP's first version are.
    """
    meshes = [tensor.device_mesh for tensor in tensors if hasattr(tensor, "device_mesh")]
    flat = flat_copies(model, world) if any(map(is_flat, tensors)) else {}
    of_flat = [flat.get(id(tensor)) for tensor in tensors if is_flat(tensor)]
    if not meshes and not any(copies != 0.0 for copies in of_flat):
        return None
    together = _holders(max(meshes, key=lambda mesh: int(mesh.size())), world) if meshes else world
    if together is None or None in of_flat:
        return _UNKNOWN
    copies: list[float] = []
    for tensor in tensors:
        in_mesh = hasattr(tensor, "device_mesh")
        own = _copies_in_mesh(tensor, together) if in_mesh else flat.get(id(tensor)) or float(together)
        if own is None:
            return _UNKNOWN
        copies.append(own)
    return Held(copies, together)


def _copies_in_mesh(tensor: Any, together: int) -> float | None:
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        return None  # a sum that is not finished: its squares cannot be added
    same = math.prod(int(mesh.size(i)) for i, placement in enumerate(placements) if placement.is_replicate())
    return together * same / int(mesh.size())


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
