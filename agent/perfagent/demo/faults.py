"""The faults of the demo, each with a real cause, and what the monitor must say about it.

Light on purpose: the command line imports this table without torch; only the training process calls the functions.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from perfagent.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "FAULTS",
    "LATER",
    "Fault",
    "Leak",
    "bad_batch",
    "bad_loss",
    "breaks",
    "hangs",
    "is_let_go",
    "named",
    "slows",
    "stall",
    "top5_accuracy",
]

STALL_S = 0.15  # how long the loader of data-stall sleeps for each batch: longer than a step, on a slow machine as well
SPIKE_STEPS = 15  # longer than the nine steps over which the loss rule takes its median
SLOW_RANK = 2
SLOW_S = (
    0.15  # how much longer that rank's forward pass takes: more than a step of the others, on a slow machine as well
)
HANGING_RANK = 1
HANGING_STEP = 20  # the rule judges from step 5 on; nothing is gained by waiting for the middle of the run
LEAK_EVERY_S = 0.4  # 1 MiB each time: 500 MiB in the three minutes for which the rule watches, whatever a step takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """story: what happens, in words. expects: the rules of which one must be the verdict. states: how the run may end.
    min_steps: the fewest steps in which it stands out from noise. settle_s: how long the verdict may take after the
    end. ranks: how many processes train together. launcher: whether `perfagent run` starts them, whose watcher sees a
    signal at once; a bare process shows as lost 30 s later. ends: after its steps; or not before the verdict came, and
    then by itself ("at the verdict") or because somebody stops it ("when stopped"). verdict_s: how long that verdict
    takes at most; usual_s: how long it usually takes."""

    name: str
    story: str
    expects: tuple[str, ...]
    states: tuple[str, ...] = ("finished",)
    min_steps: int = 10
    settle_s: float = 20.0
    ranks: int = 1
    launcher: bool = False
    ends: Literal["after its steps", "at the verdict", "when stopped"] = "after its steps"
    verdict_s: float = 0.0
    usual_s: float = 0.0

    def begins(self, steps: int) -> int:
        """The step at which it happens: the middle of the run, for a spike its end (the rule first learns what is
        usual)."""
        if self.name == "hang":
            return HANGING_STEP
        return steps - SPIKE_STEPS + 1 if self.name == "spike" else max(3, steps // 2)


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(name="none", story="nothing goes wrong", expects=("healthy",)),
        Fault(
            name="nan",
            story="half-way, a batch in which every token is masked: the mean over nothing is 0/0 = NaN",
            expects=("nonfinite_loss",),
        ),
        Fault(
            name="spike",
            story=f"at the end, {SPIKE_STEPS} batches whose targets are noise (a corrupt shard of data)",
            expects=("loss_spike",),
            min_steps=300,  # the rule watches 200 steps before it judges, and compares with the 128 before
        ),
        Fault(
            name="data-stall",
            story=f"the loader needs {STALL_S * 1000:.0f} ms more for every batch, as with a slow disk or a heavy transform",
            expects=("data_bound",),
            min_steps=40,  # the rule calls it critical after 20 steps; some more to leave the first ones behind
        ),
        Fault(
            name="sync",
            story="the top-5 accuracy of each batch is counted token by token, and every number is read with .item()",
            expects=("sync_bound",),
            min_steps=200,  # the agent counts such reads once the training has run for some seconds
        ),
        Fault(
            name="oom",
            story="half-way, an allocation far larger than the memory of the device",
            expects=("oom_observed",),
            states=("oom",),
        ),
        Fault(
            name="exception",
            story="half-way, a token that the vocabulary does not have: the embedding raises IndexError",
            expects=("process_crash",),
            states=("failed",),
        ),
        Fault(
            name="killed",
            story="half-way, the training process gets SIGKILL, as from the kernel or the scheduler",
            expects=("process_crash", "lost_contact"),
            states=("killed", "lost"),
            launcher=True,
            # where nobody saw the end, silence raises an alert after 30 s, and not in the server's first 60 s
            settle_s=120.0,
        ),
        Fault(
            name="hang",
            story=(
                f"in step {HANGING_STEP}, rank {HANGING_RANK} of 2 reads from a pipe that stays empty, as from a network "
                "disk that is gone, and the other rank waits for its gradients"
            ),
            expects=("hang",),
            states=("preempted",),
            min_steps=HANGING_STEP,
            ranks=2,
            launcher=True,
            ends="when stopped",
            verdict_s=150.0,
            usual_s=80.0,  # the rule waits for 60 s
        ),
        Fault(
            name="straggler",
            story=f"the forward pass of rank {SLOW_RANK} of 4 takes {SLOW_S * 1000:.0f} ms longer, as on a throttled device",
            expects=("straggler",),
            min_steps=150,  # the rule judges from step 16 on, and its finding must hold for 6 s
            ranks=4,
        ),
        Fault(
            name="leak",
            story="a list keeps a copy of the logits of some steps, and nobody empties it",
            expects=("host_memory_leak",),
            ends="at the verdict",
            verdict_s=330.0,
            usual_s=210.0,  # the rule wants to see growth for three minutes, after the first 10 s
        ),
    )
}

LATER = (
    "divergence",
    "grad-explosion",
    "throughput-drop",
    "checkpoint-stall",
    "scale-collapse",
)


def named(name: str) -> Fault:
    """The fault of that name. Raises ConfigError for one that is not there yet."""
    if name in FAULTS:
        return FAULTS[name]
    known = f"there are: {', '.join(FAULTS)}"
    if name in LATER:
        raise ConfigError(f"the fault {name!r} comes in a later version of the demo; {known}")
    raise ConfigError(f"there is no fault {name!r}; {known}")


def stall(fault: Fault) -> None:
    """Called by the loader for each batch."""
    if fault.name == "data-stall":
        time.sleep(STALL_S)


def bad_batch(fault: Fault, step: int, steps: int, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The batch of that step (counted from 1), spoiled if the fault says so."""
    begin = fault.begins(steps)
    if fault.name == "spike" and begin <= step < begin + SPIKE_STEPS:
        return tokens, targets.new_empty(targets.shape).random_(0, 256)
    if fault.name == "exception" and step == begin:
        tokens = tokens.clone()
        tokens[0, 0] = 10**6
    return tokens, targets


def bad_loss(fault: Fault, step: int, steps: int, token_losses: Tensor) -> Tensor:
    """The mean of the losses of all tokens that are not masked; nothing is masked in a healthy batch."""
    masked = fault.name == "nan" and step == fault.begins(steps)
    kept = token_losses.new_zeros(token_losses.shape) if masked else token_losses.new_ones(token_losses.shape)
    return (token_losses * kept).sum() / kept.sum()


def breaks(fault: Fault, step: int, steps: int, like: Tensor) -> None:
    """Ends the process where the fault says so, in the way it says."""
    if step != fault.begins(steps):
        return
    if fault.name == "oom":
        # A real refusal of the allocator: 4 PiB are more than any machine maps. CUDA raises OutOfMemoryError, the CPU's
        # allocator a RuntimeError ("can't allocate memory").
        like.new_empty(2**50)
    if fault.name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def top5_accuracy(fault: Fault, logits: Tensor, targets: Tensor) -> float | None:
    """The share of tokens that are among the five likeliest, counted as the fault does it; no other counts them."""
    if fault.name != "sync":
        return None
    likeliest, wanted = logits.topk(5).indices.flatten(0, 1), targets.flatten()
    right = 0
    for token in range(len(wanted)):
        for place in range(5):
            if likeliest[token, place].item() == wanted[token].item():
                right += 1
    return right / len(wanted)


def slows(fault: Fault, rank: int) -> None:
    """Called in the forward pass of each step."""
    if fault.name == "straggler" and rank == SLOW_RANK:
        time.sleep(SLOW_S)


def hangs(fault: Fault, step: int, steps: int, rank: int) -> None:
    """Called at the beginning of each step."""
    if fault.name == "hang" and rank == HANGING_RANK and step == fault.begins(steps):
        read_from_a_pipe_that_stays_empty()


def read_from_a_pipe_that_stays_empty() -> None:
    """The demo holds the other end of the standard input and writes nothing. The read ends when the demo does."""
    sys.stdin.buffer.read()


def is_let_go() -> bool:
    """Whether the demo has the verdict that it waited for: it closes our standard input then, or has ended itself."""
    return bool(select.select([sys.stdin], [], [], 0.0)[0])


class Leak:
    """Keeps a copy of what it is given in the host's memory, every LEAK_EVERY_S, and drops none."""

    def __init__(self, fault: Fault, clock: Callable[[], float] = time.monotonic) -> None:
        self.kept: list[Any] = []
        self._leaks, self._clock, self._next = fault.name == "leak", clock, 0.0

    def keep(self, logits: Tensor) -> None:
        now = self._clock()
        if self._leaks and now >= self._next:
            self._next = now + LEAK_EVERY_S
            self.kept.append(logits.cpu().numpy().copy())
