"""Collectives on tensors that nobody else holds any more when the call returns.

gloo works on threads of its own. One that is done with a collective wakes whoever waits, and drops a moment later what
it worked with: the tensor, and the thread-local state of whoever began it. That takes the interpreter, and up to 5 ms
where the training thread is busy. A script that ends meanwhile destroys its process group with the interpreter held,
and the group waits for its threads: none of them ever goes on. (Seen with torch 2.13.)

A tensor that a thread holds is seen to be held. What DistributedDataParallel sends is not: the loop rests at its end.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from perfagent.errors import ConfigError

__all__ = ["Agreement", "Ranks", "all_gather", "all_reduce", "need_group", "rank_of_job", "rest", "world_of_job"]

Group: TypeAlias = dist.ProcessGroup | None
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
        raise ConfigError("there is no process group: start with torchrun, and call init_process_group() first")


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, group: Group = None) -> None:
    """torch.distributed.all_reduce, waited for."""
    before = references(tensor)
    dist.all_reduce(tensor, op=op, group=group)
    let_go(tensor, before)


def all_gather(into: list[Tensor], tensor: Tensor, *, group: Group = None) -> None:
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


T = TypeVar("T")


class Ranks:
    """All ranks of the job, over a group of its own. Making one is a collective: every rank makes it at the same place.

    timeout_s: how long a rank waits for the others before it fails."""

    def __init__(self, *, timeout_s: float = 1800.0) -> None:
        self.world, self.rank = world_of_job(), rank_of_job()
        self.timeout_s = timeout_s
        self.group: dist.ProcessGroup | None = None
        if self.world > 1:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, mine: T) -> list[T]:
        """What every rank gave, by rank, on every rank."""
        if self.group is None:
            return [mine]
        answers: list[Any] = [None] * self.world
        dist.all_gather_object(answers, mine, group=self.group)
        return answers

    def all_arrive(self, within_s: float) -> bool:
        """Whether every rank comes here in time. A group that failed is not used again."""
        if self.group is None:
            return True
        try:
            dist.monitored_barrier(self.group, timeout=timedelta(seconds=within_s), wait_all_ranks=False)
        except (RuntimeError, dist.DistBackendError):
            return False
        return True

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's part of work that any rank can do."""
        return items[self.rank :: self.world]


class Agreement:
    """Brings one small number of every rank together while training goes on, about once a second.

    `look(mine)` is called at every step on every rank; now and then it answers the greatest number of all ranks, at the
    same step on every rank, else None. The sum travels between two looks, so nobody waits for it unless a rank is late
    by that long. How many steps lie between is agreed the same way, from how long steps take."""

    every_s = 1.0

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._work: Any = None
        self._numbers = torch.zeros(2)
        self._before = 0
        self._every = self._left = self._steps = 1
        self._at = 0.0

    def look(self, mine: int, now_s: float) -> int | None:
        """mine: 0 or a positive number. now_s: seconds of a monotonic clock."""
        if self.ranks.group is None:
            return mine
        self._left -= 1
        if self._left > 0:
            return None
        answer: int | None = None
        took_s = 0.0
        if self._work is not None:
            self._work.wait()
            let_go(self._numbers, self._before)
            answer = int(self._numbers[0])
            slowest_s = float(self._numbers[1])
            if slowest_s > 0:
                self._every = max(1, min(1000, int(self.every_s / slowest_s)))
            took_s = (now_s - self._at) / self._steps
        self._at, self._steps, self._left = now_s, self._every, self._every
        self._numbers = torch.tensor([float(mine), took_s])
        self._before = references(self._numbers)
        self._work = dist.all_reduce(self._numbers, op=dist.ReduceOp.MAX, group=self.ranks.group, async_op=True)
        return answer

    def close(self) -> None:
        if self._work is not None:
            with contextlib.suppress(RuntimeError):  # a rank that is gone
                self._work.wait()
                let_go(self._numbers, self._before)
            self._work = None

    def __del__(self) -> None:
        """A script may end without a word: its last sum is then done, or will be in a moment."""
        if self._work is None:
            return
        with contextlib.suppress(Exception):  # at the interpreter's end much is gone already
            until = time.monotonic() + MOST_S
            while not self._work.is_completed() and time.monotonic() < until:
                time.sleep(0.001)
            self._work = None
            let_go(self._numbers, self._before)
