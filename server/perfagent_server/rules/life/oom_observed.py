"""oom_observed: a process of the run ended because memory ran out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.evidence import one_line
from perfagent_server.rules.rule import Events, Life, Place, Question, Rule, Words
from perfagent_server.rules.window import End, Window

__all__ = ["OomObserved", "is_oom", "memory_of"]

_SHARED = re.compile(
    r"workers are out of shared memory|unable to (allocate|mmap) shared memory|insufficient shared memory"
)
_WORKER = re.compile(r"DataLoader worker.*killed by signal: Killed", re.DOTALL)
"""A worker that got SIGKILL: the kernel sends it when memory ran out, and hardly anyone else does."""
_HOST = re.compile(r"DefaultCPUAllocator|alloc_cpu|_ArrayMemoryError|Unable to allocate [\d.]+ \w+ for an array")
_GPU = re.compile(r"CUDA|cuda|\bHIP\b|\bhip[A-Z]|GPU|XPU|MPS|CUBLAS|CUDNN|CUSOLVER|CUSPARSE")
_PLAIN = re.compile(r"MemoryError\b|\bbad_alloc\b|cannot allocate memory(?! in static TLS)", re.IGNORECASE)
"""Python's, C++'s and the system's own words: the host's memory, where no GPU is named beside them."""
_OOM = re.compile(
    r"out of memory|OutOfMemory|can't allocate memory|not enough memory|_STATUS_ALLOC_FAILED|MemoryAllocation\b",
    re.IGNORECASE,
)
_ANY = (_OOM, _PLAIN, _HOST, _WORKER, _SHARED)


def is_oom(end: End) -> bool:
    """Whether a process ended because memory ran out: its own state says so, or its exception does."""
    if end.state == "oom":
        return True
    said = (end.exception, end.reason, end.traceback[-500:])
    return end.state == "failed" and any(_ran_out(text) for text in said)


def _ran_out(text: str) -> bool:
    return any(form.search(text) for form in _ANY)


def memory_of(end: End) -> str:
    """Which memory ran out: "gpu", "host", "shared" (what loader workers pass their batches in), or "" when nothing
    tells."""
    said = f"{end.exception}\n{end.reason}"
    if not _ran_out(said):
        said = f"{said}\n{end.traceback}"  # it came of another exception, whose words these are
    if _SHARED.search(said):
        return "shared"
    if _HOST.search(said) or _WORKER.search(said):
        return "host"
    if _GPU.search(said):
        return "gpu"
    by_the_kernel = end.state == "oom" and not end.exception
    return "host" if by_the_kernel or _PLAIN.search(said) else ""


_WHAT = {"gpu": "GPU memory", "host": "Host memory", "shared": "The loader's shared memory (/dev/shm)", "": "Memory"}


@dataclass(frozen=True, kw_only=True)
class OomObserved(Rule):
    """A process of the run ended because memory ran out: the GPU's, the host's, or what loader workers share with the
    trainer."""

    id: ClassVar[str] = "oom_observed"
    severities = ("critical",)
    place = Place(Question.IS_IT_DEAD, 1)
    reads = (Events("state"),)
    charts = ("cuda/reserved_bytes", "gpu/memory_used_bytes", "host/memory_used_bytes")
    life = Life(outlives_run=True)
    english = Words(
        name="Out of memory",
        meaning="A process of the run ended because memory ran out.",
        fires=(
            "When a process ended because memory ran out: the memory of the GPU, the memory of the host (also if "
            "only a loader worker was killed), or the shared memory of the loader workers. Each of the three has its "
            "own fix."
        ),
        remedies={
            "": (
                "Halve the batch size and double gradient accumulation, or use shorter sequences (max_length); then try "
                "mixed precision, FlashAttention (scaled_dot_product_attention), activation checkpointing, and sharding "
                "(FSDP or ZeRO), in this order. If one sample still does not fit, train less of the model (LoRA, on "
                "quantized weights), or split it over GPUs (tensor or pipeline parallelism). If much memory is reserved "
                "but not allocated, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
            ),
            "host memory": (
                "It is the host's memory, not the GPU's: use fewer DataLoader workers (num_workers) and a lower "
                "prefetch_factor, read data piece by piece (memory-mapped files) instead of keeping it all in "
                "memory, keep it in arrays, which workers share, instead of lists of Python objects, which each of "
                "them copies, and drop what is kept of every step (lists of losses or outputs). Then raise the limit "
                "of the container, the control group or the batch job."
            ),
            "shared memory": (
                "Workers pass batches in /dev/shm, which is 64 MB in a container unless more is asked for: start it "
                "with --shm-size=8g or --ipc=host (Kubernetes: an emptyDir with medium: Memory on /dev/shm). Until "
                "then use fewer workers, a lower prefetch_factor, or num_workers=0."
            ),
        },
    )
    chinese = Words(
        name="内存耗尽",
        meaning="运行的某个进程因内存耗尽而结束。",
        fires=(
            "某个进程因 GPU 显存、主机内存（包括仅有加载 worker 被杀死的情况）或 worker 共享内存耗尽而结束时触发。"
            "三种情况各有对策。"
        ),
        remedies={
            "": (
                "将批次减半并把梯度累积加倍，或缩短序列（max_length）；然后依次尝试混合精度、"
                "FlashAttention（scaled_dot_product_attention）、激活检查点和分片（FSDP 或 ZeRO）。若一个样本仍放不下，"
                "请只训练模型的一部分（LoRA，权重可量化），或把模型切分到多个 GPU（张量或流水线并行）。"
                "若保留而未分配的显存很多，请设置 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True。"
            ),
            "host memory": (
                "耗尽的是主机内存而非显存：减少 DataLoader 的 worker 数和 prefetch_factor，"
                "用内存映射文件分块读取数据，用数组代替 Python 对象列表（后者会被每个 worker 复制），"
                "不要保留每一步的损失或输出。然后再提高容器、控制组或作业的内存上限。"
            ),
            "shared memory": (
                "worker 通过 /dev/shm 传递批次，容器中默认只有 64 MB：启动时加 --shm-size=8g 或 "
                "--ipc=host（Kubernetes：在 /dev/shm 挂载 medium: Memory 的 emptyDir）。在此之前减少 worker 数或 "
                "prefetch_factor，或设 num_workers=0。"
            ),
        },
    )

    def judge(self, window: Window) -> Finding | None:
        ends = [end for end in window.ends if is_oom(end)]
        if not ends:
            return None
        first = ends[0]
        memory = memory_of(first)
        likely = " most likely" if _WORKER.search(f"{first.exception}\n{first.reason}") else ""
        what = f"{_WHAT[memory]}{likely} ran out"
        said = first.reason or first.exception
        step = first.step or window.step
        return self.found(
            "critical",
            f"{_WHAT[memory]} ran out on rank {first.rank} after step {step:,}",
            f"{what} on rank {first.rank} after step {step}" + (f": {one_line(said)}" if said else "."),
            cause=f"{memory} memory" if memory in ("host", "shared") else "",
            since_step=step,
            ranks=sorted({end.rank for end in ends}),
            evidence={
                "state": first.state, "memory": memory, "reason": first.reason, "exception": first.exception,
                "traceback": first.traceback[-4000:],
            },
        )  # fmt: skip
