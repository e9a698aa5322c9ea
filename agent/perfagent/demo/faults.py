"""The faults of the demo, each with a real cause, and what the monitor must say about it.

Light on purpose: the command line imports this table without torch; only the training process calls the functions.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfagent.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FAULTS", "LATER", "Fault", "bad_batch", "bad_loss", "breaks", "named", "stall"]

STALL_S = 0.15  # how long the loader of data-stall sleeps for each batch: longer than a step, on a slow machine as well
SPIKE_STEPS = 15  # longer than the nine steps over which the loss rule takes its median


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """story: what happens, in words. expects: the rules of which one must be the verdict. states: how the run may end.
    min_steps: the fewest steps in which it stands out from noise. settle_s: how long the verdict may take after the
    end."""

    name: str
    story: str
    expects: tuple[str, ...]
    states: tuple[str, ...] = ("finished",)
    min_steps: int = 10
    settle_s: float = 20.0

    def begins(self, steps: int) -> int:
        """The step at which it happens: the middle of the run, for a spike its end (the rule first learns what is
        usual)."""
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
            # where nobody saw the end, silence raises an alert after 30 s, and not in the server's first 60 s
            settle_s=120.0,
        ),
    )
}

LATER = (
    "divergence",
    "grad-explosion",
    "sync",
    "throughput-drop",
    "leak",
    "hang",
    "straggler",
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
