"""Faults of how fast the job trains: what its steps wait for."""

from __future__ import annotations

import io
import os
import time
from typing import TYPE_CHECKING, Any

from perfagent_tools.demo.faults.fault import Fault, Job, middle
from perfagent_tools.demo.faults.learning import evaluate

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FAULTS"]

_STALL_S = 0.15  # how much longer a batch takes: longer than a step, on a slow machine as well
_SLOW_RANK = 2
_SLOW_S = 0.15  # how much longer its forward pass takes: more than a step of the others, on a slow machine as well
_BUFFER_BYTES = 64 * 2**20
_THREADS_PER_CORE = 8
_TEXT_TOKENS = 16  # of 64
_SHORTEST, _LENGTHS = 48, 12
_SAVED_EVERY = 10
_SLOW_WRITE_STEPS = 8.0  # usual ones
_EVALUATED_EVERY = 10
_SLOWED_STEPS = 2.0  # usual ones: of less, a busy machine takes the blame
_LEARNED_STEPS = 8  # after so many it is known what a step takes


class DataStall(Fault):
    def collated(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(_STALL_S)
        return tokens, targets


class SlowRank(Fault):
    def forward(self, job: Job, step: int) -> None:
        if job.rank == _SLOW_RANK:
            time.sleep(_SLOW_S)


class LoadImbalance(Fault):
    def forward(self, job: Job, step: int) -> None:
        if step % self.ranks == job.rank:
            time.sleep(_SLOW_S)


class AllReduce(Fault):
    def end(self, job: Job, step: int, logits: Tensor) -> None:
        """Averages a buffer over all ranks."""
        import torch
        import torch.distributed as dist

        if "buffer" not in job.kept:
            job.kept["buffer"] = torch.zeros(_BUFFER_BYTES // 4)
        dist.all_reduce(job.kept["buffer"])


class Oversubscribed(Fault):
    def prepare(self, job: Job) -> None:
        import torch

        torch.set_num_threads(_THREADS_PER_CORE * (os.cpu_count() or 1))


class Padding(Fault):
    def prepare(self, job: Job) -> None:
        """The embedding knows the token that pads."""
        from torch import nn

        token = job.model.get_submodule("token")
        assert isinstance(token, nn.Embedding)
        token.padding_idx = 0

    def collated(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        tokens[:, _TEXT_TOKENS:], targets[:, _TEXT_TOKENS:] = 0, -100
        return tokens, targets


class Recompiles(Fault):
    def prepare(self, job: Job) -> None:
        """No backend that generates code: it would need a C++ compiler, and what matters is how often it is asked."""
        job.model.compile(backend="eager", dynamic=False)

    def batch(self, job: Job, step: int, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        length = _SHORTEST + step % _LENGTHS
        return tokens[:, :length], targets[:, :length]


class ThroughputDrop(Fault):
    def begins(self, steps: int) -> int:
        return middle(steps)

    def forward(self, job: Job, step: int) -> None:
        if step >= job.middle:
            time.sleep(_SLOWED_STEPS * job.usual_s)


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
        min_steps=60,  # the rule judges 20 steps, and its finding must hold for as long again
    ),
    SlowRank(
        name="straggler",
        story=f"the forward pass of rank {_SLOW_RANK} of 4 takes {_SLOW_S * 1000:.0f} ms longer, as on a throttled device",
        expects=("straggler",),
        min_steps=150,  # the rule judges from step 16 on, and its finding must hold for 6 s
        ranks=4,
    ),
    LoadImbalance(
        name="load-imbalance",
        story=f"in each step the long sequences fall on the other of 2 ranks, and cost it {_SLOW_S * 1000:.0f} ms",
        expects=("load_imbalance",),
        min_steps=150,
        ranks=2,
    ),
    AllReduce(
        name="all-reduce",
        story=f"after each step 2 ranks average a buffer of {_BUFFER_BYTES // 2**20} MiB, and nothing overlaps with that",
        expects=("comm_bound",),
        min_steps=150,
        ranks=2,
    ),
    Oversubscribed(
        name="oversubscribed",
        story=f"torch computes with {_THREADS_PER_CORE} threads for each core of the machine",
        expects=("cpu_oversubscribed",),
        ends="at the verdict",
        verdict_s=240.0,
        usual_s=75.0,  # the rule looks at a minute of stepping
    ),
    Padding(
        name="padding",
        story=f"every text of {_TEXT_TOKENS} tokens is padded to 64, so three quarters of the work is for nothing",
        expects=("tokens_wasted",),
        min_steps=300,
    ),
    Recompiles(
        name="recompiles",
        story=f"the model is compiled, and fed texts of {_LENGTHS} lengths: it is compiled anew for each, until torch gives up",
        expects=("recompiles",),
        min_steps=60,
    ),
    ThroughputDrop(
        name="throughput-drop",
        story=f"from half-way on, every forward pass takes {_SLOWED_STEPS:g} whole steps longer, as on a device that throttles",
        expects=("throughput_regression",),
        min_steps=300,  # the rule compares with the 200 steps before, of which it needs a hundred
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
