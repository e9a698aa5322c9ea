"""oom_observed: a process of the run ended because memory ran out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.evidence import one_line
from perfagent_server.rules.memory.readings import OF_HOSTS, hosts
from perfagent_server.rules.rule import Events, Life, Question, Rule
from perfagent_server.rules.window import End, Window

__all__ = ["OomObserved", "is_oom", "memory_of"]

_SHARED = re.compile(
    r"workers are out of shared memory|unable to (allocate|mmap) shared memory|insufficient shared memory"
)
_WORKER = re.compile(r"DataLoader worker.*killed by signal: Killed", re.DOTALL)
"""A worker that got SIGKILL: the kernel sends it when memory ran out, and hardly anyone else does."""
_ROOM = 0.7  # of the memory of the host, or its group: below it nobody kills to free some
_HOST = re.compile(r"DefaultCPUAllocator|alloc_cpu|_ArrayMemoryError|Unable to allocate [\d.]+ \w+ for an array")
_GPU = re.compile(r"CUDA|cuda|\bHIP\b|\bhip[A-Z]|GPU|XPU|MPS|CUBLAS|CUDNN|CUSOLVER|CUSPARSE")
_PLAIN = re.compile(r"MemoryError\b|\bbad_alloc\b|cannot allocate memory(?! in static TLS)", re.IGNORECASE)
"""Python's, C++'s and the system's own words: the host's memory, where no GPU is named beside them."""
_OOM = re.compile(
    r"out of memory|OutOfMemory|can't allocate memory|not enough memory|_STATUS_ALLOC_FAILED|MemoryAllocation\b",
    re.IGNORECASE,
)
_ANY = (_OOM, _PLAIN, _HOST, _WORKER, _SHARED)


def is_oom(end: End, window: Window) -> bool:
    """Whether a process ended because memory ran out: its own state says so, or its exception does. Not where a worker was
    killed, but none by the kernel for want of memory, and there was room."""
    if end.state == "oom":
        return True
    said: tuple[str, ...] = (end.exception, end.said, end.traceback[-500:])
    known = hosts(window) if end.oom_kills == 0 else []
    if known and all(host.used < _ROOM * host.total for host in known):
        said = tuple(_WORKER.sub("", text) for text in said)
    return end.state == "failed" and any(_ran_out(text) for text in said)


def _ran_out(text: str) -> bool:
    return any(form.search(text) for form in _ANY)


def memory_of(end: End) -> str:
    """Which memory ran out: "gpu", "host", "shared" (what loader workers pass their batches in), or "" when nothing
    tells."""
    said = f"{end.exception}\n{end.said}"
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


@dataclass(frozen=True, kw_only=True)
class OomObserved(Rule):
    """A process ended because memory ran out."""

    id: ClassVar[str] = "oom_observed"
    severities = ("critical",)
    question = Question.IS_IT_DEAD
    reads = (Events("state"), *OF_HOSTS)
    charts = ("cuda/reserved_bytes", "gpu/memory_used_bytes", "host/memory_used_bytes")
    life = Life(outlives_run=True)

    def judge(self, window: Window) -> Finding | None:
        ends = [end for end in window.ends if is_oom(end, window)]
        if not ends:
            return None
        first = ends[0]
        memory = memory_of(first)
        said = first.said or first.exception
        step = first.step or window.step
        return self.found(
            "critical",
            cause=f"{memory} memory" if memory in ("host", "shared") else "",
            since_step=step,
            ranks=sorted({end.rank for end in ends}),
            evidence={
                "rank": first.rank, "step": step, "memory": memory or "unknown", "said": one_line(said).rstrip("."),
                "doubt": "likely" if _WORKER.search(f"{first.exception}\n{first.said}") else None,
                "state": first.state, "reason": first.said, "reason_facts": first.facts, "exception": first.exception,
                "traceback": first.traceback[-4000:],
            },
        )  # fmt: skip
