"""The claims of the sources, in our own words: five guides to training speed, which this project was asked to hold to,
and others.

Each claim that a benchmark measures has the range of its figure, so that a measurement can be compared with it. Claims
that no single machine can measure are listed with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CLAIMS", "ELSEWHERE", "SOURCES", "Claim", "Elsewhere", "claims_of"]

SOURCES = {
    "S0": "guide to performance and debugging (unpublished; no author or address is known)",
    "S1": "questions and answers on optimization (unpublished, as S0)",
    "S2": "summary of training-code optimization (unpublished, as S0)",
    "S3": "guide to advanced topics (unpublished, as S0)",
    "S4": "chapter on training speed of vision-language models (unpublished, as S0)",
    "PyTorch blog": "PyTorch blog: Reducing Model Checkpointing Times by Over 10x with PyTorch Distributed Asynchronous "
    "Checkpointing",
    "PyTorch 2.0": "pytorch.org: announcement of PyTorch 2.0",
    "HF blog": "Hugging Face blog: Improving Hugging Face Training Efficiency Through Packing with Flash Attention 2 (2024; the "
    "paper is arXiv 2407.09105)",
}
"""Short name -> what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One sentence of a source that a benchmark judges.

    id: benchmark and figure, as in `amp.speed`. figure: what of the report is compared. least, most: the claimed range
    in `unit` ("times", or "%" as a share 0..100); None on a side that the source leaves open, on both where it gives no
    figure.
    """

    id: str
    sources: tuple[str, ...]
    says: str
    unit: str = "times"
    least: float | None = None
    most: float | None = None

    def compared(self, figure: float | None) -> str:
        """Where a measured figure lies: "within", "below" or "above" the claim, "no figure" in the source, "not
        measured".

        Compared is what is printed: whole percent, hundredths of times.
        """
        if figure is None:
            return "not measured"
        figure = round(figure, 0 if self.unit == "%" else 2)
        if self.least is None and self.most is None:
            return "no figure"
        if self.least is not None and figure < self.least:
            return "below"
        return "above" if self.most is not None and figure > self.most else "within"


CLAIMS = (
    Claim(
        id="amp.speed", sources=("S1", "S2"), says="mixed precision trains 1.5 to 3 times faster", least=1.5, most=3.0
    ),
    Claim(
        id="amp.memory",
        sources=("S0", "S1"),
        says="mixed precision saves 40 to 50 % of the memory",
        unit="%",
        least=40,
        most=50,
    ),
    Claim(
        id="checkpointing.memory",
        sources=("S0",),
        says="activation checkpointing saves 50 to 80 % of the memory",
        unit="%",
        least=50,
        most=80,
    ),
    Claim(
        id="checkpointing.every-second",
        sources=("S1", "S2"),
        says="activation checkpointing saves 30 to 50 % of the memory",
        unit="%",
        least=30,
        most=50,
    ),
    Claim(
        id="checkpointing.time",
        sources=("S0", "S1", "S2"),
        says="it makes a step 20 to 30 % longer",
        unit="%",
        least=20,
        most=30,
    ),
    Claim(
        id="workers.speed",
        sources=("S3",),
        says="from 2 to 8 loader workers a batch takes a quarter of the time (3.2 to 0.8 s)",
        least=4.0,
    ),
    Claim(
        id="workers.utilization",
        sources=("S3",),
        says="with 8 workers instead of 2 the GPU is busy for 95 % of the time, not 60 %",
        unit="%",
        least=95,
    ),
    Claim(
        id="workers.cached",
        sources=("S3",),
        says="samples from a cache take 0.3 s a batch where 8 workers took 0.8 s",
        least=2.67,
    ),
    Claim(
        id="pinning.copy",
        sources=("S1",),
        says="pinned memory is copied to the GPU 1.5 to 2 times faster",
        least=1.5,
        most=2.0,
    ),
    Claim(
        id="pinning.training", sources=("S1",), says="and makes training 5 to 10 % faster", unit="%", least=5, most=10
    ),
    Claim(
        id="packing.fill",
        sources=("S0", "S4"),
        says="packed sequences leave (almost) no padding; how much, neither guide says",
        unit="%",
    ),
    Claim(
        id="packing.speed",
        sources=("HF blog",),
        says="packing trains up to 2 times as many tokens a second",
        least=1.0,
        most=2.0,
    ),
    Claim(
        id="attention.speed",
        sources=("S4",),
        says="FlashAttention is 3.72 times faster than standard attention (A100, 2048 tokens)",
        least=3.72,
    ),
    Claim(
        id="attention.memory",
        sources=("S4",),
        says="and takes 65 % less memory there (12.45 to 4.32 GB)",
        unit="%",
        least=65,
    ),
    Claim(id="attention.short", sources=("S4",), says="below 512 tokens standard attention is as good", most=1.0),
    Claim(
        id="attention.training",
        sources=("S2",),
        says="FlashAttention makes training 10 to 20 % faster",
        unit="%",
        least=10,
        most=20,
    ),
    Claim(
        id="async-checkpoint.blocked",
        sources=("PyTorch blog",),
        says="an asynchronous checkpoint blocks the training over 10 times less",
        least=10.0,
    ),
    Claim(
        id="compile.speed",
        sources=("PyTorch 2.0",),
        says="a compiled model trains 1.2 (fp32) to 1.5 times (mixed precision) as fast",
        least=1.2,
        most=1.5,
    ),
    Claim(
        id="compile.modes",
        sources=("S0", "S1"),
        says="reduce-overhead and max-autotune are faster; by how much, neither guide says",
    ),
    Claim(
        id="prefetch.speed",
        sources=("S0", "S2"),
        says="a better data path, prefetching to the GPU in it, trains 10 to 20 % faster",
        unit="%",
        least=10,
        most=20,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """A claim that no `perfagent bench` measures: why not, or where it is measured instead."""

    sources: tuple[str, ...]
    says: str
    why: str


ELSEWHERE = (
    Elsewhere(
        sources=("S1",),
        says="4 GPUs work at 85 to 90 % of 4 times the speed of one",
        why="needs several GPUs; compare `samples_per_s` of your own runs with one GPU and with four",
    ),
    Elsewhere(
        sources=("S4",),
        says="tuning takes the all-reduce of 13 billion parameters on 8 A100 from 500 to 50 ms",
        why="needs several GPUs; the claim leaves out what was changed",
    ),
    Elsewhere(
        sources=("S4",),
        says="an image pipeline goes from 140 to 40 ms",
        why="depends on images and disk; measure yours with `perfagent bench workers` and `phase/data_s` of your run",
    ),
    Elsewhere(
        sources=("S2",),
        says="all of it together trains 1.4 to 2.2 times faster",
        why="the sum of other claims; `perfagent tune` prints the gain of each change",
    ),
    Elsewhere(sources=("S4",), says="all of it together trains 2 to 5 times faster", why="the sum of other claims"),
    Elsewhere(
        sources=("S2",),
        says="DeepSpeed's bf16 is 1.5 to 2 times faster",
        why="`perfagent bench amp` measures the same matrix products, without DeepSpeed around them",
    ),
    Elsewhere(
        sources=("S0", "S4"),
        says="LoRA trains less than a tenth (r 8) or a twentieth (r 64) of the parameters",
        why="counted, not timed: `examples/recipes/lora.py` prints the share",
    ),
    Elsewhere(
        sources=("S4",),
        says="xFormers attention is 2.89 times faster than standard attention (A100, 2048 tokens)",
        why="torch's memory-efficient kernel is the same; `perfagent bench attention` measures it on a GPU",
    ),
    Elsewhere(
        sources=("S2",),
        says="monitoring has a small overhead",
        why="measured by `scripts/bench overhead`, in docs/benchmarks.md",
    ),
)


def claims_of(benchmark: str) -> tuple[Claim, ...]:
    return tuple(claim for claim in CLAIMS if claim.id.partition(".")[0] == benchmark)
