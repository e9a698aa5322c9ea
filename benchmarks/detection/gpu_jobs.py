"""Jobs recorded on a real GPU (tests/data/h200), and what each of them is ill of."""

from __future__ import annotations

import lzma

from records import DATA

from perfagent.wire import decode
from perfagent_server.backtest.moment import Moment
from perfagent_server.backtest.reported import Reported, in_order_of_time

__all__ = ["ON", "TRUTH", "moments_of"]

ON = "an NVIDIA H200"
TRUTH: dict[str, tuple[str, ...]] = {
    "transformer": (),
    "copies": ("h2d_bound",),
    "reads": ("sync_bound", "low_mfu"),
    "loader": ("data_bound",),
    "splinters": ("gpu_fragmentation", "low_mfu"),
    "leak": ("gpu_memory_leak", "low_mfu"),
    "out_of_memory": ("oom_observed",),
}
"""Job -> the rules that must say so, a remark counts. The jobs are those of benchmarks/gpu/diagnosis.py: splinters and
leak leave the GPU idle for most of each step, and reads for half of it."""


def moments_of(job: str) -> list[Moment]:
    frame = decode(lzma.decompress((DATA / "h200" / f"{job}.frame.xz").read_bytes()))
    return [*in_order_of_time([Reported(1, 0, frame.groups, frame.events)])]
