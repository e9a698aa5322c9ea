"""Lets the ranks of a job agree, over gloo groups of our own: no saving thread meets the training's collectives.

Collectives of one group must come in the same order on every rank, so each thread that talks has a group to itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from perfagent_loop.collectives import MOST_S, let_go, rank_of_job, references, world_of_job

__all__ = ["Agreement", "Ranks"]

T = TypeVar("T")


class Ranks:
    """All ranks of the job, over a group of its own. Making one is a collective: every rank makes it at the same place.

    timeout_s: how long a rank waits for the others before it fails.
    """

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
    by that long. How many steps lie between is agreed the same way, from how long steps take.
    """

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
