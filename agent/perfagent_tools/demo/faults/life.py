"""Faults that end a job, keep it from going on, or would end it."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING

from perfagent_tools.demo.faults.fault import Fault, Job, middle

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FAULTS", "is_let_go"]

_HANGING_RANK = 1
_HANGING_STEP = 20  # the rule judges from step 5 on; nothing is gained by waiting for the middle of the run
LEAK_EVERY_S = 0.1  # 1 MiB each time: the 190 MiB that the rule wants to see take 20 s, whatever a step takes


class OutOfMemory(Fault):
    def begins(self, steps: int) -> int:
        return middle(steps)

    def end(self, job: Job, step: int, logits: Tensor) -> None:
        if step == job.middle:
            # A real refusal of the allocator: 4 PiB are more than any machine maps. CUDA raises OutOfMemoryError, the
            # CPU's allocator a RuntimeError ("can't allocate memory").
            logits.new_empty(2**50)


class BadToken(Fault):
    def begins(self, steps: int) -> int:
        return middle(steps)

    def batch(self, job: Job, step: int, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if step == job.middle:
            tokens = tokens.clone()
            tokens[0, 0] = 10**6
        return tokens, targets


class Killed(Fault):
    def begins(self, steps: int) -> int:
        return middle(steps)

    def end(self, job: Job, step: int, logits: Tensor) -> None:
        if step == job.middle:
            os.kill(os.getpid(), signal.SIGKILL)


class Hang(Fault):
    def begins(self, steps: int) -> int:
        return _HANGING_STEP

    def begin(self, job: Job, step: int) -> None:
        if job.rank == _HANGING_RANK and step == _HANGING_STEP:
            read_from_a_pipe_that_stays_empty()


def read_from_a_pipe_that_stays_empty() -> None:
    """The demo holds the other end of the standard input and writes nothing. The read ends when the demo does."""
    sys.stdin.buffer.read()


def is_let_go() -> bool:
    """Whether the demo has the verdict that it waited for: it closes our standard input then, or has ended itself."""
    return bool(select.select([sys.stdin], [], [], 0.0)[0])


class Leak(Fault):
    def end(self, job: Job, step: int, logits: Tensor) -> None:
        """Keeps a copy in the host's memory, every LEAK_EVERY_S, and drops none."""
        now = time.monotonic()
        if now >= job.kept.get("next", 0.0):
            job.kept["next"] = now + LEAK_EVERY_S
            job.kept.setdefault("copies", []).append(logits.cpu().numpy().copy())


FAULTS: tuple[Fault, ...] = (
    OutOfMemory(
        name="oom",
        story="half-way, an allocation far larger than the memory of the device",
        expects=("oom_observed",),
        states=("oom",),
    ),
    BadToken(
        name="exception",
        story="half-way, a token that the vocabulary does not have: the embedding raises IndexError",
        expects=("process_crash",),
        states=("failed",),
    ),
    Killed(
        name="killed",
        story="half-way, the training process gets SIGKILL, as from the kernel or the scheduler",
        expects=("process_crash", "lost_contact"),
        states=("killed", "lost"),
        launcher=True,
        # where nobody saw the end, silence raises an alert after 30 s, and not in the server's first 60 s
        settle_s=120.0,
    ),
    Hang(
        name="hang",
        story=(
            f"in step {_HANGING_STEP}, rank {_HANGING_RANK} of 2 reads from a pipe that stays empty, as from a network "
            "disk that is gone, and the other rank waits for its gradients"
        ),
        expects=("hang", "rank_absent"),
        states=("preempted",),
        min_steps=_HANGING_STEP,
        ranks=2,
        launcher=True,
        ends="when stopped",
        verdict_s=150.0,
        usual_s=30.0,  # the rule waits for two looks at each rank, the second after 10 s
    ),
    Leak(
        name="leak",
        story="a list keeps a copy of the logits of some steps, and nobody empties it",
        expects=("host_memory_leak",),
        ends="at the verdict",
        verdict_s=330.0,
        usual_s=85.0,  # the rule wants to see 190 MiB, and then growth for 40 s and 180 steps more
    ),
)
