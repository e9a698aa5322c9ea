"""Rules on memory: it ran out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.alerts.life import Life
from perfagent_server.diagnosis.remedies import REMEDIES
from perfagent_server.rules.window import End, Window

__all__ = ["OomObserved", "is_oom"]

_OOM = re.compile(r"out of memory|OutOfMemoryError|\bMemoryError\b|can't allocate memory|cannot allocate memory", re.IGNORECASE)


def is_oom(end: End) -> bool:
    """Whether a process ended because memory ran out: its own state says so, or its exception does."""
    if end.state == "oom":
        return True
    return end.state == "failed" and bool(
        _OOM.search(end.exception) or _OOM.search(end.reason) or _OOM.search(end.traceback[-500:])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OomObserved:
    """A process of the run ended because GPU or host memory ran out."""

    id: ClassVar[str] = "oom_observed"
    on: ClassVar[tuple[str, ...]] = ("state",)
    urgent: ClassVar[str] = ""
    life: ClassVar[Life] = Life(outlives_run=True)

    def judge(self, window: Window) -> Finding | None:
        ends = [end for end in window.ends if is_oom(end)]
        if not ends:
            return None
        first = ends[0]
        device = (
            "GPU"
            if re.search(r"CUDA|HIP|GPU", first.exception + first.reason)
            else "Host"
            if first.state == "oom" and not first.exception
            else ""
        )
        what = f"{device} memory ran out" if device else "Memory ran out"
        said = first.reason or first.exception
        return Finding(
            rule=self.id,
            severity="critical",
            message=f"{what} on rank {first.rank} after step {first.step or window.step}"
            + (f": {_short(said)}" if said else "."),
            since_step=first.step or window.step,
            ranks=sorted({end.rank for end in ends}),
            evidence={
                "state": first.state,
                "reason": first.reason,
                "exception": first.exception,
                "traceback": first.traceback[-4000:],
            },
            fix=REMEDIES[self.id],
        )


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "..."
