"""The catalogue of metric names: what each means, its unit, which direction is better, and how ranks are put together.

One metric is one row here, one field on the wire and one chart; the same name stands in all three. Names that a user
logs are not in the catalogue: `metric()` then answers with a mean over ranks and no unit.

A family has a row for the group of its names: `grad_norm/` followed by a layer, which is the path of a parameter or
module as in the model (`grad_norm/encoder.3.weight`). Of `grad_norm/` and `update_ratio/` a run has at most 256 layers
each, of `dead_share/` and `grad_nonfinite/` at most 64; together far below the number of names that a run may have.
What a family says of layers, a series says of the whole: `grad/norm`, `update/ratio`, `dead/share`, `grad/nonfinite`.
"""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

__all__ = ["CATALOGUE", "FAMILIES", "PHASES", "TIMED_PHASES", "Metric", "metric", "parts_of", "whole_of"]

OverRanks = Literal["mean", "sum", "max", "min"]
Better = Literal["higher", "lower", "neither"]
_BY_SCRIPT = "logged by the training script"


class Metric(Struct, frozen=True):
    """name: as on the wire; title: as on a chart; unit: "" when there is none; over_ranks: how ranks become one value.

    root_of: the series in which ranks send their parts where none of them knows the value (sharded gradients): it is
    then the square root of the sum of the parts of all ranks.
    """

    name: str
    title: str
    unit: str = ""
    meaning: str = ""
    better: Better = "neither"
    over_ranks: OverRanks = "mean"
    root_of: str = ""

    @property
    def is_logged(self) -> bool:
        """By the script: it is not in the catalogue."""
        return self.meaning == _BY_SCRIPT


PHASES = ("data", "h2d", "forward", "backward", "optimizer", "comm", "checkpoint", "eval", "other")
TIMED_PHASES = (*PHASES, "compile", "rollout")
"""PHASES, `compile` and `rollout`. The last two are not drawn in the chart of the step."""

_UNIT_OF_ENDING = {
    "_bytes_per_s": "B/s", "_bytes": "B", "_pct": "%", "_s": "s", "_w": "W", "_j": "J", "_c": "°C", "_mhz": "MHz",
}  # fmt: skip
_OTHER_UNITS = {
    "samples_per_s": "samples/s", "tokens_per_s": "tokens/s", "flops_per_s": "FLOP/s", "grad/nonfinite": "tensors",
    "batch/repeats": "batches", "batch/distinct": "batches", "amp/skipped": "steps", "agent/dropped": "samples",
    "process/page_faults_per_step": "faults/step",
}  # fmt: skip
_ROOT_OF = {"grad/norm": "grad/local_square_sum", "grad_norm/": "grad_square_sum/"}

_Row = tuple[str, str, str, Better, OverRanks]
"""Name, title, meaning, which direction is better, how ranks become one value."""

_ROWS: tuple[_Row, ...] = (
    ("loss", "Loss", "the loss that the optimizer minimises, unscaled", "lower", "mean"),
    ("lr", "Learning rate", "learning rate of the first parameter group", "neither", "mean"),
    ("step_time_s", "Step time", "from the end of one optimizer step to the end of the next", "lower", "max"),
    ("samples_per_s", "Samples per second", "samples consumed, all ranks together", "higher", "sum"),
    ("tokens_per_s", "Tokens per second", "tokens consumed, all ranks together", "higher", "sum"),
    ("mfu", "MFU", "model FLOPs utilization, a share of the device's dense peak", "higher", "mean"),
    ("flops_per_s", "FLOP/s", "the model's own arithmetic, all ranks together", "higher", "sum"),
    ("sync/calls_per_step", "Synchronizing calls",
     "calls that made the host wait for the device, in a sampled step", "lower", "max"),
    ("sync/reads_per_step", "Values read one by one",
     "reads of single values of tensors on the CPU, in a sampled step", "lower", "max"),
    ("sync/reading_s", "Reading values one by one",
     "time of a sampled step in loops that read single values of tensors on the CPU", "lower", "max"),
    ("phase/data_s", "Data wait", "time the stepping thread waited for the next batch", "lower", "mean"),
    ("phase/h2d_s", "Host to device", "copies to the device on the stream that computes", "lower", "mean"),
    ("phase/forward_s", "Forward", "from the model's first call to the start of backward", "lower", "mean"),
    ("phase/backward_s", "Backward", "time inside torch.autograd.backward", "lower", "mean"),
    ("phase/optimizer_s", "Optimizer", "time inside the optimizer's step", "lower", "mean"),
    ("phase/comm_s", "Communication", "waiting for other ranks: communication that nothing overlaps", "lower", "mean"),
    ("phase/checkpoint_s", "Checkpoint", "time spent saving", "lower", "mean"),
    ("phase/eval_s", "Evaluation", "time spent evaluating", "lower", "mean"),
    ("phase/other_s", "Other", "what is left of the step", "lower", "mean"),
    ("phase/compile_s", "Compiling", "time in which torch.compile compiled", "lower", "mean"),
    ("compile/count", "Compilations", "how often torch.compile compiled a function", "lower", "max"),
    ("compile/recompiles", "Recompilations",
     "compilations of a function that was compiled before, because a guard failed", "lower", "max"),
    ("compile/graph_breaks", "Graph breaks", "places where torch.compile had to split a graph", "lower", "max"),
    ("grad/norm", "Gradient norm", "global 2-norm of the gradients after unscaling, before clipping", "neither", "max"),
    ("grad/local_square_sum", "Square sum of local gradients",
     "of sharded parameters: what this rank adds to the square of the gradient norm; what several ranks hold counts once",
     "neither", "sum"),
    ("grad/clipped_scaled", "Clipped before unscaling",
     "1 in a step whose gradients were clipped while they still carried the loss scale", "lower", "max"),
    ("grad/zero_share", "Zero gradients", "share of the parameters whose gradient is all zero", "lower", "mean"),
    ("grad/vanishing_share", "Vanishing gradients",
     "share of the parameters whose gradient has a root mean square below 1e-7 but is not zero", "lower", "mean"),
    ("update/ratio", "Update-to-weight ratio",
     "2-norm of what a step changed over that of the weights, from a sample of every parameter", "neither", "mean"),
    ("update/unmoved_share", "Parameters that stand still",
     "share of the trainable numbers that did not change over 20 steps or more, from a sample of every parameter",
     "lower", "mean"),
    ("params/unoptimized_share", "Parameters without an optimizer",
     "share of the trainable numbers that receive gradients and that no optimizer has", "lower", "max"),
    ("dead/share", "Dead units", "share of the units of ReLU modules that are zero in all of 64 rows or more", "lower", "mean"),
    ("grad/nonfinite", "Non-finite gradients", "parameters whose gradient holds NaN or Inf", "lower", "sum"),
    ("batch/padding_pct", "Padding",
     "share of the places of a batch of sequences that hold no token, from a sample of the batches", "lower", "mean"),
    ("batch/ignored_pct", "Labels left out",
     "share of the labels that the loss leaves out (-100, or zero in a loss mask), from a sample of the batches",
     "neither", "mean"),
    ("batch/constant_pct", "Constant batches",
     "share of the batches in which all rows of the input are the same, from a sample of the batches", "lower", "mean"),
    ("batch/one_class_pct", "Batches of one class",
     "share of the batches in which all rows have the same class, from a sample of the batches", "lower", "mean"),
    ("batch/input_mean", "Mean of the input", "of the numbers of a batch, from a sample of them", "neither", "mean"),
    ("batch/input_std", "Spread of the input",
     "standard deviation of the numbers of a batch, from a sample", "neither", "mean"),
    ("batch/repeats", "Repeated batches", "batches so far that had come before in their epoch", "lower", "sum"),
    ("batch/distinct", "Different batches", "different batches of the epoch so far", "neither", "mean"),
    ("batch/epoch", "Epoch", "number of the epoch that begins with the step", "neither", "max"),
    ("amp/scale", "Loss scale", "scale of the GradScaler", "neither", "min"),
    ("amp/skipped", "Skipped steps", "steps that the GradScaler skipped so far", "lower", "max"),
    ("cuda/allocated_bytes", "Allocated GPU memory", "live tensors in torch's caching allocator", "lower", "max"),
    ("cuda/reserved_bytes", "Reserved GPU memory", "held by torch's caching allocator", "lower", "max"),
    ("cuda/active_bytes", "Active GPU memory", "live tensors, and blocks that a stream may still use", "lower", "max"),
    ("cuda/peak_allocated_bytes", "Peak GPU memory", "highest allocation so far", "lower", "max"),
    ("cuda/peak_reserved_bytes", "Peak reserved GPU memory", "most that torch held so far", "lower", "max"),
    ("cuda/inactive_split_bytes", "Split GPU memory", "free parts of blocks in use: splinters", "lower", "max"),
    ("cuda/fragmentation", "Fragmentation", "share of the reserved memory that no live tensor uses", "lower", "max"),
    ("cuda/headroom_bytes", "GPU memory headroom", "free on the device, and reserved but unused", "higher", "min"),
    ("cuda/alloc_retries", "Allocation retries", "allocations that needed the cache emptied first", "lower", "sum"),
    ("cuda/ooms", "Out-of-memory errors", "allocations that failed", "lower", "sum"),
    ("memory/parameters_bytes", "Parameter memory", "parameters that this rank holds", "lower", "max"),
    ("memory/gradients_bytes", "Gradient memory", "gradients, at the size they have when they exist", "lower", "max"),
    ("memory/optimizer_state_bytes", "Optimizer memory", "state of the optimizer on this rank", "lower", "max"),
    ("memory/activations_and_other_bytes", "Activation memory", "all else, at the peak", "lower", "max"),
    ("memory/offloaded_bytes", "Offloaded memory", "parameters, gradients and state kept elsewhere", "lower", "max"),
    ("gpu/utilization_pct", "GPU utilization", "share of time in which the device worked", "higher", "mean"),
    ("gpu/utilization_min_pct", "GPU utilization, lowest", "lowest reading of the second", "higher", "min"),
    ("gpu/utilization_max_pct", "GPU utilization, highest", "highest reading of the second", "higher", "max"),
    ("gpu/memory_busy_pct", "GPU memory activity", "share of time in which memory was read or written", "neither", "mean"),
    ("gpu/memory_used_bytes", "GPU memory", "memory in use on the device, by all processes", "lower", "max"),
    ("gpu/memory_used_min_bytes", "GPU memory, lowest", "lowest reading of the second", "lower", "min"),
    ("gpu/memory_used_max_bytes", "GPU memory, highest", "highest reading of the second", "lower", "max"),
    ("gpu/memory_total_bytes", "GPU memory size", "memory of the device", "neither", "max"),
    ("gpu/power_w", "GPU power", "power draw of the device", "lower", "sum"),
    ("gpu/power_min_w", "GPU power, lowest", "lowest reading of the second", "lower", "min"),
    ("gpu/power_max_w", "GPU power, highest", "highest reading of the second", "lower", "max"),
    ("gpu/power_limit_w", "GPU power limit", "limit that the driver enforces", "neither", "sum"),
    ("gpu/energy_j", "GPU energy", "energy since the run began", "lower", "sum"),
    ("gpu/energy_per_step_j", "Energy per step", "energy of a step, over five seconds or more", "lower", "sum"),
    ("gpu/temperature_c", "GPU temperature", "core temperature", "lower", "max"),
    ("gpu/memory_temperature_c", "GPU memory temperature", "temperature of the memory", "lower", "max"),
    ("gpu/sm_clock_mhz", "SM clock", "clock of the streaming multiprocessors", "higher", "min"),
    ("gpu/sm_clock_min_mhz", "SM clock, lowest", "lowest reading of the second", "higher", "min"),
    ("gpu/sm_clock_max_mhz", "SM clock, highest", "highest reading of the second", "higher", "max"),
    ("gpu/memory_clock_mhz", "Memory clock", "clock of the device's memory", "higher", "min"),
    ("gpu/fan_pct", "Fan", "speed of the fan, of its most", "neither", "max"),
    ("gpu/throttle_sw_power_cap_pct", "Throttled: sw_power_cap", "time held back by the power limit", "lower", "max"),
    ("gpu/throttle_hw_slowdown_pct", "Throttled: hw_slowdown",
     "time held back by the hardware (heat or power)", "lower", "max"),
    ("gpu/throttle_sync_boost_pct", "Throttled: sync_boost",
     "time held back by another GPU of a synchronized group", "lower", "max"),
    ("gpu/throttle_sw_thermal_pct", "Throttled: sw_thermal", "time held back by the driver, because of heat", "lower", "max"),
    ("gpu/throttle_hw_thermal_pct", "Throttled: hw_thermal", "time held back by the hardware, because of heat", "lower", "max"),
    ("gpu/throttle_power_brake_pct", "Throttled: power_brake", "time held back by the machine's power supply", "lower", "max"),
    ("gpu/sm_active_pct", "SM activity", "share of the multiprocessors that worked, over time (GPM)", "higher", "mean"),
    ("gpu/sm_occupancy_pct", "SM occupancy", "resident warps, of the most there can be (GPM)", "higher", "mean"),
    ("gpu/tensor_active_pct", "Tensor cores", "share of time in which tensor cores worked (GPM)", "higher", "mean"),
    ("gpu/dram_active_pct", "GPU memory bandwidth", "bandwidth of the memory in use (GPM)", "neither", "mean"),
    ("gpu/pcie_sent_bytes_per_s", "PCIe sent", "from the device over PCIe", "neither", "sum"),
    ("gpu/pcie_received_bytes_per_s", "PCIe received", "to the device over PCIe", "neither", "sum"),
    ("gpu/pcie_link_width", "PCIe lanes", "lanes in use now", "higher", "min"),
    ("gpu/pcie_link_generation", "PCIe generation", "generation in use now; an idle link slows down", "higher", "min"),
    ("gpu/pcie_replays", "PCIe replays", "repeated transfers since the driver was loaded", "lower", "sum"),
    ("gpu/nvlink_sent_bytes_per_s", "NVLink sent", "from the device over all links", "neither", "sum"),
    ("gpu/nvlink_received_bytes_per_s", "NVLink received", "to the device over all links", "neither", "sum"),
    ("gpu/nvlink_crc_flit_errors", "NVLink flow control errors", "all links, since the driver was loaded", "lower", "sum"),
    ("gpu/nvlink_crc_data_errors", "NVLink data errors", "all links, since the driver was loaded", "lower", "sum"),
    ("gpu/nvlink_replay_errors", "NVLink replay errors", "all links, since the driver was loaded", "lower", "sum"),
    ("gpu/nvlink_recovery_errors", "NVLink recovery errors", "all links, since the driver was loaded", "lower", "sum"),
    ("gpu/ecc_corrected_volatile", "ECC corrected, volatile",
     "corrected memory errors since the driver was loaded", "lower", "sum"),
    ("gpu/ecc_uncorrected_volatile", "ECC uncorrected, volatile",
     "uncorrected memory errors since the driver was loaded", "lower", "sum"),
    ("gpu/ecc_corrected_aggregate", "ECC corrected, aggregate", "corrected memory errors in the device's life", "lower", "sum"),
    ("gpu/ecc_uncorrected_aggregate", "ECC uncorrected, aggregate",
     "uncorrected memory errors in the device's life", "lower", "sum"),
    ("gpu/remapped_rows_corrected", "Rows remapped, corrected", "after correctable errors", "lower", "sum"),
    ("gpu/remapped_rows_uncorrected", "Rows remapped, uncorrected", "after uncorrectable errors", "lower", "sum"),
    ("gpu/remap_pending", "Remap pending", "1 when a row waits for a reset to be replaced", "lower", "max"),
    ("gpu/remap_failed", "Remap failed", "1 when a row could not be replaced", "lower", "max"),
    ("gpu/retired_pages_single", "Pages retired (single bit)", "after correctable errors", "lower", "sum"),
    ("gpu/retired_pages_double", "Pages retired (double bit)", "after uncorrectable errors", "lower", "sum"),
    ("gpu/xid", "Xid error", "code of an error that the driver reported at that moment", "lower", "max"),
    ("gpu/process_memory_bytes", "GPU memory of this process", "what this process itself holds", "lower", "max"),
    ("gpu/process_utilization_pct", "GPU utilization of this process", "time in which its kernels ran", "higher", "mean"),
    ("gpu/other_memory_bytes", "GPU memory of others", "what other processes hold on this device", "lower", "max"),
    ("gpu/other_processes", "Other processes", "other processes on this device", "lower", "max"),
    ("host/cpu_pct", "Host CPU", "share of all cores of the host in use", "neither", "mean"),
    ("host/iowait_pct", "I/O wait", "share of all cores that had to wait for a disk", "lower", "max"),
    ("host/cores", "Cores", "cores that this process may use: its affinity and its group's quota", "neither", "sum"),
    ("host/cpu_throttled_pct", "CPU throttling", "share of periods in which the quota was used up", "lower", "max"),
    ("host/cpu_pressure_pct", "CPU pressure", "time in which some task waited for a processor", "lower", "max"),
    ("host/memory_pressure_pct", "Memory pressure", "time in which some task waited for memory", "lower", "max"),
    ("host/io_pressure_pct", "I/O pressure", "time in which some task waited for a disk", "lower", "max"),
    ("host/memory_used_bytes", "Host memory", "memory in use on the host", "lower", "max"),
    ("host/memory_total_bytes", "Host memory size", "memory of the host or its control group", "neither", "max"),
    ("host/oom_kills", "Out-of-memory kills", "processes of our group that the kernel killed so far", "lower", "sum"),
    ("host/load1", "Load average", "runnable tasks, one-minute average", "neither", "max"),
    ("host/disk_read_bytes_per_s", "Disk read", "read from all disks of the host", "neither", "sum"),
    ("host/disk_write_bytes_per_s", "Disk write", "written to all disks of the host", "neither", "sum"),
    ("host/disk_busy_pct", "Disk busy", "share of time in which the busiest disk worked", "lower", "max"),
    ("host/net_sent_bytes_per_s", "Network sent", "sent over all interfaces", "neither", "sum"),
    ("host/net_received_bytes_per_s", "Network received", "received over all interfaces", "neither", "sum"),
    ("process/cpu_pct", "Process CPU", "CPU of the training process, 100 % is one core", "neither", "sum"),
    ("process/rss_bytes", "Process memory", "resident memory of the training process", "lower", "sum"),
    ("process/system_cpu_pct", "Time in the kernel",
     "time that the training thread spends in the kernel, 100 % is one core", "lower", "max"),
    ("process/page_faults_per_step", "Page faults",
     "minor page faults of the training thread in a step: memory that the system hands out page by page", "lower", "max"),
    ("process/rss_file_bytes", "Mapped files", "of it pages of files, given back when memory is short", "lower", "sum"),
    ("process/threads", "Threads", "threads of the training process", "neither", "max"),
    ("process/disk_read_bytes_per_s", "Process disk read", "fetched from disks by this process", "neither", "sum"),
    ("process/disk_write_bytes_per_s", "Process disk write", "sent to disks by this process", "neither", "sum"),
    ("process/workers", "Data workers", "processes that this one started: the loader's workers", "neither", "sum"),
    ("process/workers_cpu_pct", "Data workers CPU", "CPU of the workers, 100 % is one core", "neither", "sum"),
    ("process/workers_rss_bytes", "Data workers memory", "resident memory, shared pages in each", "lower", "sum"),
    ("process/workers_pss_bytes", "Data workers, memory of their own",
     "a page that several processes share counts in parts; without files and shared memory; only on Linux, now and then",
     "lower", "sum"),
    ("process/workers_rss_file_bytes", "Mapped files, data workers",
     "of it pages of files and of shared memory", "lower", "sum"),
    ("disk/work_free_bytes", "Free space, work", "free space where the working directory is", "higher", "min"),
    ("disk/work_used_pct", "Disk used, work", "of the file system of the working directory", "lower", "max"),
    ("disk/spool_free_bytes", "Free space, spool", "free space where the agent's spool is", "higher", "min"),
    ("disk/spool_used_pct", "Disk used, spool", "of the file system of the agent's spool", "lower", "max"),
    ("disk/checkpoint_free_bytes", "Free space, checkpoint", "free space where the checkpoints is", "higher", "min"),
    ("disk/checkpoint_used_pct", "Disk used, checkpoint", "of the file system of the checkpoints", "lower", "max"),
    ("agent/overhead_pct", "Agent overhead", "CPU the agent takes, as a share of the step time", "lower", "max"),
    ("agent/dropped", "Dropped samples", "samples and events the agent had to drop so far", "lower", "sum"),
)  # fmt: skip

_FAMILIES: tuple[_Row, ...] = (
    ("grad_norm/", "Gradient norm", "2-norm of a layer's gradients after unscaling, before clipping", "neither", "max"),
    ("grad_square_sum/", "Square sum of local gradients",
     "of sharded parameters: what this rank adds to the square of a layer's gradient norm", "neither", "sum"),
    ("grad_nonfinite/", "Non-finite numbers", "numbers of a parameter's gradient that are NaN or Inf", "lower", "max"),
    ("update_ratio/", "Update-to-weight ratio", "2-norm of a step's change over that of a layer's weights", "neither", "mean"),
    ("module_share/", "Share of forward", "share of the forward pass that a part of the model takes", "neither", "mean"),
    ("dead_share/", "Dead units", "share of an activation's units that are zero for a whole batch", "lower", "mean"),
)  # fmt: skip


def _catalogued(rows: tuple[_Row, ...]) -> dict[str, Metric]:
    found = {}
    for name, title, meaning, better, over_ranks in rows:
        unit = _OTHER_UNITS.get(name) or next((u for end, u in _UNIT_OF_ENDING.items() if name.endswith(end)), "")
        found[name] = Metric(name, title, unit, meaning, better, over_ranks, _ROOT_OF.get(name, ""))
    return found


CATALOGUE = _catalogued(_ROWS)
FAMILIES = _catalogued(_FAMILIES)
_WHOLES = {parts: whole for whole, parts in _ROOT_OF.items()}


def metric(name: str) -> Metric:
    """The catalogue's row for a name; a node's other GPUs (`node_gpu3/power_w`) read like the rank's own."""
    row = CATALOGUE.get(name)
    if row is not None:
        return row
    own = CATALOGUE.get(re.sub(r"node_gpu\d+/", "gpu/", name)) if name.startswith("node_gpu") else None
    group, slash, layer = name.partition("/")
    if own is not None:
        return replace(own, name=name, title=f"{own.title} ({group})")
    family = FAMILIES.get(group + slash)
    if family is not None and layer:
        parts = family.root_of + layer if family.root_of else ""
        return replace(family, name=name, title=f"{family.title}: {layer}", root_of=parts)
    return Metric(name, name, "", _BY_SCRIPT)


def parts_of(name: str) -> str:
    """The series in which ranks send their parts of `name` where none of them knows it; "" for most names."""
    row = CATALOGUE.get(name)
    return row.root_of if row is not None else metric(name).root_of if name.startswith("grad_norm/") else ""


def whole_of(name: str) -> str:
    """The series of which a rank's `name` is a part: the root of the sum over all ranks. "" for most names."""
    whole = _WHOLES.get(name)
    if whole is not None:
        return whole
    group, slash, layer = name.partition("/")
    family = _WHOLES.get(group + slash)
    return family + layer if family is not None and layer else ""
