"""The catalogue of metric names: what each means, its unit, which direction is better, and how ranks are put together.

One metric is one row here, one field on the wire and one chart; the same name stands in all three. Names that a user logs
are not in the catalogue: `metric()` then answers with a mean over ranks and no unit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["CATALOGUE", "PHASES", "Metric", "metric"]

OverRanks = Literal["mean", "sum", "max", "min"]
Better = Literal["higher", "lower", "neither"]


@dataclass(frozen=True, slots=True)
class Metric:
    """name: as on the wire; title: as on a chart; unit: "" when there is none; over_ranks: how ranks become one value."""

    name: str
    title: str
    unit: str = ""
    meaning: str = ""
    better: Better = "neither"
    over_ranks: OverRanks = "mean"


PHASES = ("data", "h2d", "forward", "backward", "optimizer", "comm", "checkpoint", "eval", "other")

_PHASE_MEANING = {
    "data": ("Data wait", "time the stepping thread waited for the next batch"),
    "h2d": ("Host to device", "time of the copies to the device"),
    "forward": ("Forward", "from the model's first call to the start of backward"),
    "backward": ("Backward", "time inside torch.autograd.backward"),
    "optimizer": ("Optimizer", "time inside the optimizer's step"),
    "comm": ("Communication", "communication that nothing overlaps"),
    "checkpoint": ("Checkpoint", "time spent saving"),
    "eval": ("Evaluation", "time spent evaluating"),
    "other": ("Other", "what is left of the step"),
}

_ROWS: tuple[Metric, ...] = (
    Metric("loss", "Loss", "", "the loss that the optimizer minimises, unscaled", "lower"),
    Metric("lr", "Learning rate", "", "learning rate of the first parameter group", "neither"),
    Metric("step_time_s", "Step time", "s", "from the end of one optimizer step to the end of the next", "lower", "max"),
    Metric("samples_per_s", "Samples per second", "samples/s", "samples consumed, all ranks together", "higher", "sum"),
    Metric("tokens_per_s", "Tokens per second", "tokens/s", "tokens consumed, all ranks together", "higher", "sum"),
    Metric("mfu", "MFU", "", "model FLOPs utilization, a share of the device's peak", "higher"),
    *(Metric(f"phase/{p}_s", _PHASE_MEANING[p][0], "s", _PHASE_MEANING[p][1], "lower", "mean") for p in PHASES),
    Metric("grad/norm", "Gradient norm", "", "global 2-norm of the gradients after unscaling, before clipping", "neither", "max"),
    Metric("grad/nonfinite", "Non-finite gradients", "tensors", "parameters whose gradient holds NaN or Inf", "lower", "sum"),
    Metric("amp/scale", "Loss scale", "", "scale of the GradScaler", "neither", "min"),
    Metric("amp/skipped", "Skipped steps", "steps", "steps that the GradScaler skipped so far", "lower", "max"),
    Metric("cuda/allocated_bytes", "Allocated GPU memory", "B", "live tensors in torch's caching allocator", "lower", "max"),
    Metric("cuda/reserved_bytes", "Reserved GPU memory", "B", "held by torch's caching allocator", "lower", "max"),
    Metric("cuda/peak_allocated_bytes", "Peak GPU memory", "B", "highest allocation so far", "lower", "max"),
    Metric("cuda/alloc_retries", "Allocation retries", "", "allocations that needed the cache emptied first", "lower", "sum"),
    Metric("cuda/ooms", "Out-of-memory errors", "", "allocations that failed", "lower", "sum"),
    Metric("gpu/utilization_pct", "GPU utilization", "%", "share of time in which a kernel ran (NVML)", "higher"),
    Metric("gpu/memory_used_bytes", "GPU memory", "B", "memory in use on the device, by all processes", "lower", "max"),
    Metric("gpu/memory_total_bytes", "GPU memory size", "B", "memory of the device", "neither", "max"),
    Metric("gpu/power_w", "GPU power", "W", "power draw of the device", "lower", "sum"),
    Metric("gpu/temperature_c", "GPU temperature", "°C", "core temperature", "lower", "max"),
    Metric("gpu/sm_clock_mhz", "SM clock", "MHz", "clock of the streaming multiprocessors", "higher", "min"),
    Metric("host/cpu_pct", "Host CPU", "%", "share of all cores of the host in use", "neither"),
    Metric("host/memory_used_bytes", "Host memory", "B", "memory in use on the host", "lower", "max"),
    Metric("host/memory_total_bytes", "Host memory size", "B", "memory of the host or its control group", "neither", "max"),
    Metric("host/load1", "Load average", "", "runnable tasks, one-minute average", "neither", "max"),
    Metric("host/disk_read_bytes_per_s", "Disk read", "B/s", "read from all disks of the host", "neither", "sum"),
    Metric("host/disk_write_bytes_per_s", "Disk write", "B/s", "written to all disks of the host", "neither", "sum"),
    Metric("host/net_sent_bytes_per_s", "Network sent", "B/s", "sent over all interfaces", "neither", "sum"),
    Metric("host/net_received_bytes_per_s", "Network received", "B/s", "received over all interfaces", "neither", "sum"),
    Metric("process/cpu_pct", "Process CPU", "%", "CPU of the training process, 100 % is one core", "neither", "sum"),
    Metric("process/rss_bytes", "Process memory", "B", "resident memory of the training process", "lower", "sum"),
    Metric("process/threads", "Threads", "", "threads of the training process", "neither", "max"),
    Metric("agent/overhead_pct", "Agent overhead", "%", "CPU the agent takes, as a share of the step time", "lower", "max"),
    Metric("agent/dropped", "Dropped samples", "samples", "samples the agent had to drop so far", "lower", "sum"),
)

CATALOGUE: dict[str, Metric] = {row.name: row for row in _ROWS}

_NODE_GPU = re.compile(r"node_gpu\d+/")


def metric(name: str) -> Metric:
    """The catalogue's row for a name; a node's other GPUs (`node_gpu3/power_w`) read like the rank's own."""
    row = CATALOGUE.get(name)
    if row is not None:
        return row
    own = CATALOGUE.get(_NODE_GPU.sub("gpu/", name)) if name.startswith("node_gpu") else None
    if own is not None:
        return Metric(name, f"{own.title} ({name.partition('/')[0]})", own.unit, own.meaning, own.better, own.over_ranks)
    return Metric(name, name, "", "logged by the training script")
