"""Collectives on tensors that nobody else holds any more when the call returns.

gloo works on threads of its own. One that is done with a collective wakes whoever waits, and drops a moment later what
it worked with: the tensor, and the thread-local state of whoever began it. There are Python objects among these, so
that takes the interpreter, and up to 5 ms where the training thread is busy. A script that ends meanwhile destroys its
process group with the interpreter held, and the group waits for its threads: none of them ever goes on. (Seen with
torch 2.13 in two of twelve runs of a training of 30 short steps, two at a time: `~AsyncWork` in `take_gil` on
`pt_gloo_runloop`, `~ProcessGroupGloo` in `join` on the main thread.)

A tensor that a thread holds is seen to be held. What DistributedDataParallel sends is not: the loop rests at its end.
"""

from __future__ import annotations

import sys
import time

import torch.distributed as dist
from torch import Tensor

from perfagent.errors import ConfigError

__all__ = [
    "MOST_S",
    "all_gather",
    "all_reduce",
    "let_go",
    "need_group",
    "rank_of_job",
    "references",
    "rest",
    "world_of_job",
]

MOST_S = 0.1
_REST_S = 0.02
_NAP_S = 2e-5
"""Long enough for another thread to get the interpreter: it takes one nap, seldom two."""


def world_of_job() -> int:
    """Number of ranks; 1 where torch.distributed is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank_of_job() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def need_group() -> None:
    """Raises ConfigError where there is no process group."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "there is no process group: call torch.distributed.init_process_group() first, in a script that torchrun started"
        )


def all_reduce(
    tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, group: dist.ProcessGroup | None = None
) -> None:
    """torch.distributed.all_reduce, waited for."""
    before = references(tensor)
    dist.all_reduce(tensor, op=op, group=group)
    let_go(tensor, before)


def all_gather(into: list[Tensor], tensor: Tensor, *, group: dist.ProcessGroup | None = None) -> None:
    """torch.distributed.all_gather, waited for."""
    tensors = (*into, tensor)
    places = range(len(tensors))
    before = [references(tensors[at]) for at in places]  # by its place: an iterator would hold it as well
    dist.all_gather(into, tensor, group=group)
    for at in places:
        let_go(tensors[at], before[at])


def references(tensor: Tensor) -> int:
    """For `let_go`, to be asked before the collective begins, by the same function."""
    return sys.getrefcount(tensor)


def let_go(tensor: Tensor, before: int) -> None:
    """Waits until the thread that worked on a tensor has dropped it: 20 µs as a rule, 0.1 s at most."""
    if not tensor.is_cpu:
        return
    until = time.monotonic() + MOST_S
    while sys.getrefcount(tensor) > before and time.monotonic() < until:
        time.sleep(_NAP_S)


def rest() -> None:
    """Gives the interpreter away for long enough for gloo's threads to be done."""
    time.sleep(_REST_S)
