"""FSDP's first version: which ranks hold the pieces of its flat parameters.

A parameter that it manages looks like any other: a view into this rank's piece of a flat one, or that flat one itself. Whether
other ranks hold the rest, and how many hold the same, is known to the wrapper of its module.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["flat_copies", "is_flat"]

_WRAPPER = "torch.distributed.fsdp.fully_sharded_data_parallel"


def is_flat(parameter: Any) -> bool:
    """Whether FSDP's first version manages it, by the mark with which that keeps itself from doing so twice."""
    return getattr(parameter, "_fsdp_flattened", False) is True


def flat_copies(model: Any, world: int) -> dict[int, float | None]:
    """By the id of each sharded parameter below `model`, how many ranks hold the piece that this rank holds; None where its
    groups of ranks do not make up the job. What is managed and not sharded (NO_SHARD) has 0: every rank holds all of it."""
    kind = getattr(sys.modules.get(_WRAPPER), "FullyShardedDataParallel", None)
    found: dict[int, float | None] = {}
    if kind is None or model is None:
        return found
    for module in model.modules():
        handle = module._handle if isinstance(module, kind) else None
        if handle is None:  # all below it has a wrapper of its own
            continue
        flat = handle.flat_param
        copies = _copies(module, handle, world) if handle.uses_sharded_strategy else 0.0
        for parameter in (flat, *(flat._params or ()), *(flat._shared_params or ())):
            found[id(parameter)] = copies
    return found


def _copies(module: Any, handle: Any, world: int) -> float | None:
    between = getattr(module, "_inter_node_pg", None)  # of HYBRID_SHARD: the ranks that hold the same piece
    copies = 1 if between is None else int(between.size())
    return float(copies) if int(handle.process_group.size()) * copies == world else None
