"""Faults of how fast the job trains: what its steps wait for."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, Any

from perfagent.demo.faults.fault import Fault, Job, middle
from perfagent.demo.faults.learning import evaluate

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FAULTS"]

_STALL_S = 0.15  # how much longer a batch takes: longer than a step, on a slow machine as well
_SLOW_RANK = 2
_SLOW_S = 0.15  # how much longer its forward pass takes: more than a step of the others, on a slow machine as well
_SAVED_EVERY = 10
_SLOW_WRITE_STEPS = 8.0  # usual ones
_EVALUATED_EVERY = 10
_LEARNED_STEPS = 8  # after so many it is known what a step takes


class DataStall(Fault):
    def load(self) -> None:
        time.sleep(_STALL_S)


class SlowRank(Fault):
    def forward(self, job: Job, step: int) -> None:
        if job.rank == _SLOW_RANK:
            time.sleep(_SLOW_S)


class ThroughputDrop(Fault):
    def begins(self, steps: int) -> int:
        return middle(steps)

    def forward(self, job: Job, step: int) -> None:
        if step >= job.middle:
            time.sleep(0.5 * job.usual_s)


class CheckpointStall(Fault):
    def end(self, job: Job, step: int, logits: Tensor) -> None:
        import torch

        if step % _SAVED_EVERY == 0 and job.rank == 0:
            torch.save(job.model.state_dict(), _SlowDisk(_SLOW_WRITE_STEPS * job.kept.setdefault("usual", job.usual_s)))


class _SlowDisk(io.BytesIO):
    """A file on a network disk that is slow to take what is written."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._waits_s = seconds

    def write(self, data: Any) -> int:
        time.sleep(self._waits_s)
        self._waits_s = 0.0
        return super().write(data)


class EvaluationStall(Fault):
    def end(self, job: Job, step: int, logits: Tensor) -> None:
        if step % _EVALUATED_EVERY == 0:
            evaluate(job, 64, repeats=8)


class Sync(Fault):
    def batch(self, job: Job, step: int, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        job.kept["targets"] = targets
        return tokens, targets

    def end(self, job: Job, step: int, logits: Tensor) -> None:
        """The share of tokens that are among the five likeliest, with every number read by itself."""
        likeliest, wanted = logits.topk(5).indices.flatten(0, 1), job.kept["targets"].flatten()
        right = 0
        for token in range(len(wanted)):
            for place in range(5):
                if likeliest[token, place].item() == wanted[token].item():
                    right += 1
        job.kept["top5"] = right / len(wanted)


class HiddenWork(Fault):
    def begins(self, steps: int) -> int:
        return _LEARNED_STEPS + 1

    def end(self, job: Job, step: int, logits: Tensor) -> None:
        time.sleep(job.kept.setdefault("usual", job.usual_s) if step >= self.begins(job.steps) else 0.0)


FAULTS: tuple[Fault, ...] = (
    DataStall(
        name="data-stall",
        story=f"the loader needs {_STALL_S * 1000:.0f} ms more for every batch, as with a slow disk or a heavy transform",
        expects=("data_bound",),
        min_steps=40,  # the rule calls it critical after 20 steps; some more to leave the first ones behind
    ),
    SlowRank(
        name="straggler",
        story=f"the forward pass of rank {_SLOW_RANK} of 4 takes {_SLOW_S * 1000:.0f} ms longer, as on a throttled device",
        expects=("straggler",),
        min_steps=150,  # the rule judges from step 16 on, and its finding must hold for 6 s
        ranks=4,
    ),
    ThroughputDrop(
        name="throughput-drop",
        story="from half-way on, every forward pass takes half a step longer, as on a device that throttles",
        expects=("throughput_regression",),
        min_steps=500,  # the rule compares with the 200 steps before
    ),
    CheckpointStall(
        name="checkpoint-stall",
        story=f"a checkpoint every {_SAVED_EVERY} steps, on a disk that takes as long as {_SLOW_WRITE_STEPS:g} steps",
        expects=("checkpoint_bound",),
        min_steps=100,
    ),
    EvaluationStall(
        name="eval-stall",
        story=f"an evaluation every {_EVALUATED_EVERY} steps that takes longer than the steps between",
        expects=("eval_bound",),
        min_steps=100,
    ),
    Sync(
        name="sync",
        story="the top-5 accuracy of each batch is counted token by token, and every number is read with .item()",
        expects=("sync_bound",),
        min_steps=200,  # the agent counts such reads once the training has run for some seconds
    ),
    HiddenWork(
        name="hidden-work",
        story="after each step the script does something else for as long as a step takes, and no phase knows of it",
        expects=("unmeasured_time",),
        min_steps=60,
    ),
)
