"""Faults of how fast the job trains: what its steps wait for."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, Any

from perfagent.demo.faults.fault import Fault, Job
from perfagent.demo.faults.learning import evaluate

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FAULTS"]

_STALL_S = 0.15  # how much longer a batch takes: longer than a step, on a slow machine as well
_SLOW_RANK = 2
_SLOW_S = 0.15  # how much longer its forward pass takes: more than a step of the others, on a slow machine as well
_SAVED_EVERY = 10
_SLOW_WRITE_S = 0.5
_EVALUATED_EVERY = 10
_USUAL_STEPS = 30  # over which the usual step time is learned


class DataStall(Fault):
    def load(self) -> None:
        time.sleep(_STALL_S)


class SlowRank(Fault):
    def forward(self, job: Job, step: int) -> None:
        if job.rank == _SLOW_RANK:
            time.sleep(_SLOW_S)


class ThroughputDrop(Fault):
    def begin(self, job: Job, step: int) -> None:
        now = time.perf_counter()
        if step < job.middle:
            job.kept.setdefault("times", []).append(now)

    def forward(self, job: Job, step: int) -> None:
        if step >= job.middle:
            times = job.kept["times"][-_USUAL_STEPS:]
            time.sleep(0.5 * (times[-1] - times[0]) / max(1, len(times) - 1))


class CheckpointStall(Fault):
    def end(self, job: Job, step: int, logits: Tensor) -> None:
        import torch

        if step % _SAVED_EVERY == 0 and job.rank == 0:
            torch.save(job.model.state_dict(), _SlowDisk())


class _SlowDisk(io.BytesIO):
    """A file on a network disk that is slow to take what is written."""

    def __init__(self) -> None:
        super().__init__()
        self._waited = False

    def write(self, data: Any) -> int:
        if not self._waited:
            self._waited = True
            time.sleep(_SLOW_WRITE_S)
        return super().write(data)


class EvaluationStall(Fault):
    def end(self, job: Job, step: int, logits: Tensor) -> None:
        if step % _EVALUATED_EVERY == 0:
            evaluate(job, 8, repeats=8)


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
    def end(self, job: Job, step: int, logits: Tensor) -> None:
        time.sleep(0.1)


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
        story=f"a checkpoint every {_SAVED_EVERY} steps, on a disk that takes {_SLOW_WRITE_S:g} s to answer",
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
        story="the script does something else for 100 ms after each step, of which no phase knows",
        expects=("unmeasured_time",),
        min_steps=60,
    ),
)
