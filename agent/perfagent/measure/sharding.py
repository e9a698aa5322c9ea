"""Finds which part of a sharded model's gradients this rank holds, and how many other ranks hold the same part.

A norm over all ranks is the root of a sum of squares. Each rank sends the sum over its own parts, with each parameter's
square divided by the number of ranks that hold the same numbers (an unsharded parameter under FSDP2, the replicated
dimension of a hybrid mesh, a layer norm under tensor parallelism). The server then only adds. No collective is issued,
and if the number of copies cannot be known, nothing is sent.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from perfagent.measure.flat_shards import flat_copies, is_flat

__all__ = ["Held", "held", "local", "world_size"]

_PIPELINE = frozenset(("pp", "pipe", "pipeline", "stage"))
"""Dimensions of a mesh along which ranks hold other layers, not copies."""


def local(tensor: Any) -> Any:
    """Returns this rank's part of a DTensor, or any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def world_size() -> int:
    """Returns the number of ranks of the job; 1 if torch.distributed is not initialized."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())


class Held(NamedTuple):
    """Which ranks hold the parts of some tensors.

    copies: for each tensor, how many ranks hold the same numbers as this rank; None if that cannot be known.
    together: how many ranks hold all that is not sharded; None likewise.
    """

    copies: list[float] | None
    together: int | None


_UNKNOWN = Held(None, None)


def held(tensors: Sequence[Any], world: int, model: Any = None) -> Held | None:
    """Returns which ranks hold the parts of these parameters; None if none of them is sharded.

    model: the model they belong to, if known; FSDP1's parameters are found through it.
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
        return None  # an unfinished sum, whose squares cannot be added
    same = math.prod(int(mesh.size(i)) for i, placement in enumerate(placements) if placement.is_replicate())
    return together * same / int(mesh.size())


def _holders(mesh: Any, world: int) -> int | None:
    """Returns how many ranks hold one whole set of a mesh's parameters: all, or those of one pipeline stage."""
    if int(mesh.size()) == world:
        return world
    root = getattr(mesh, "_get_root_mesh", lambda: None)()
    if root is None or int(root.size()) != world or not root.mesh_dim_names:
        return None
    stages = math.prod(int(root.size(i)) for i, name in enumerate(root.mesh_dim_names) if name in _PIPELINE)
    return world // stages
