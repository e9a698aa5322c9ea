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

import msgspec

__all__ = ["CATALOGUE", "FAMILIES", "PHASES", "TIMED_PHASES", "Metric", "metric", "parts_of", "whole_of"]

OverRanks = Literal["mean", "sum", "max", "min"]
Better = Literal["higher", "lower", "neither"]
_BY_SCRIPT = "logged by the training script"


class Metric(msgspec.Struct, frozen=True):
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
"""Those, and what only some trainings have: compiling and rollouts are in no chart of the step, as a phase that a script
named is in none."""

_PHASE_MEANING = {
    "data": ("Data wait", "time the stepping thread waited for the next batch"),
    "h2d": ("Host to device", "copies to the device on the stream that computes"),
    "forward": ("Forward", "from the model's first call to the start of backward"),
    "backward": ("Backward", "time inside torch.autograd.backward"),
    "optimizer": ("Optimizer", "time inside the optimizer's step"),
    "comm": ("Communication", "waiting for other ranks: communication that nothing overlaps"),
    "checkpoint": ("Checkpoint", "time spent saving"),
    "eval": ("Evaluation", "time spent evaluating"),
    "other": ("Other", "what is left of the step"),
}

_THROTTLE = {
    "sw_power_cap": "the power limit",
    "hw_slowdown": "the hardware (heat or power)",
    "sync_boost": "another GPU of a synchronized group",
    "sw_thermal": "the driver, because of heat",
    "hw_thermal": "the hardware, because of heat",
    "power_brake": "the machine's power supply",
}

_PRESSURE = (("cpu", "CPU", "a processor"), ("memory", "Memory", "memory"), ("io", "I/O", "a disk"))

_GPU: tuple[Metric, ...] = (
    Metric("gpu/utilization_pct", "GPU utilization", "%", "share of time in which the device worked", "higher"),
    Metric("gpu/utilization_min_pct", "GPU utilization, lowest", "%", "lowest reading of the second", "higher", "min"),
    Metric(
        "gpu/utilization_max_pct", "GPU utilization, highest", "%", "highest reading of the second", "higher", "max"
    ),
    Metric(
        "gpu/memory_busy_pct",
        "GPU memory activity",
        "%",
        "share of time in which memory was read or written",
        "neither",
    ),
    Metric("gpu/memory_used_bytes", "GPU memory", "B", "memory in use on the device, by all processes", "lower", "max"),
    Metric("gpu/memory_used_min_bytes", "GPU memory, lowest", "B", "lowest reading of the second", "lower", "min"),
    Metric("gpu/memory_used_max_bytes", "GPU memory, highest", "B", "highest reading of the second", "lower", "max"),
    Metric("gpu/memory_total_bytes", "GPU memory size", "B", "memory of the device", "neither", "max"),
    Metric("gpu/power_w", "GPU power", "W", "power draw of the device", "lower", "sum"),
    Metric("gpu/power_min_w", "GPU power, lowest", "W", "lowest reading of the second", "lower", "min"),
    Metric("gpu/power_max_w", "GPU power, highest", "W", "highest reading of the second", "lower", "max"),
    Metric("gpu/power_limit_w", "GPU power limit", "W", "limit that the driver enforces", "neither", "sum"),
    Metric("gpu/energy_j", "GPU energy", "J", "energy since the run began", "lower", "sum"),
    Metric(
        "gpu/energy_per_step_j", "Energy per step", "J", "energy of a step, over five seconds or more", "lower", "sum"
    ),
    Metric("gpu/temperature_c", "GPU temperature", "°C", "core temperature", "lower", "max"),
    Metric("gpu/memory_temperature_c", "GPU memory temperature", "°C", "temperature of the memory", "lower", "max"),
    Metric("gpu/sm_clock_mhz", "SM clock", "MHz", "clock of the streaming multiprocessors", "higher", "min"),
    Metric("gpu/sm_clock_min_mhz", "SM clock, lowest", "MHz", "lowest reading of the second", "higher", "min"),
    Metric("gpu/sm_clock_max_mhz", "SM clock, highest", "MHz", "highest reading of the second", "higher", "max"),
    Metric("gpu/memory_clock_mhz", "Memory clock", "MHz", "clock of the device's memory", "higher", "min"),
    Metric("gpu/fan_pct", "Fan", "%", "speed of the fan, of its most", "neither", "max"),
    *(
        Metric(f"gpu/throttle_{name}_pct", f"Throttled: {name}", "%", f"time held back by {by}", "lower", "max")
        for name, by in _THROTTLE.items()
    ),
    Metric(
        "gpu/sm_active_pct", "SM activity", "%", "share of the multiprocessors that worked, over time (GPM)", "higher"
    ),
    Metric("gpu/sm_occupancy_pct", "SM occupancy", "%", "resident warps, of the most there can be (GPM)", "higher"),
    Metric("gpu/tensor_active_pct", "Tensor cores", "%", "share of time in which tensor cores worked (GPM)", "higher"),
    Metric("gpu/dram_active_pct", "GPU memory bandwidth", "%", "bandwidth of the memory in use (GPM)", "neither"),
    Metric("gpu/pcie_sent_bytes_per_s", "PCIe sent", "B/s", "from the device over PCIe", "neither", "sum"),
    Metric("gpu/pcie_received_bytes_per_s", "PCIe received", "B/s", "to the device over PCIe", "neither", "sum"),
    Metric("gpu/pcie_link_width", "PCIe lanes", "", "lanes in use now", "higher", "min"),
    Metric(
        "gpu/pcie_link_generation",
        "PCIe generation",
        "",
        "generation in use now; an idle link slows down",
        "higher",
        "min",
    ),
    Metric("gpu/pcie_replays", "PCIe replays", "", "repeated transfers since the driver was loaded", "lower", "sum"),
    Metric("gpu/nvlink_sent_bytes_per_s", "NVLink sent", "B/s", "from the device over all links", "neither", "sum"),
    Metric(
        "gpu/nvlink_received_bytes_per_s", "NVLink received", "B/s", "to the device over all links", "neither", "sum"
    ),
    *(
        Metric(
            f"gpu/nvlink_{name}_errors",
            f"NVLink {what} errors",
            "",
            "all links, since the driver was loaded",
            "lower",
            "sum",
        )
        for name, what in (
            ("crc_flit", "flow control"),
            ("crc_data", "data"),
            ("replay", "replay"),
            ("recovery", "recovery"),
        )
    ),
    *(
        Metric(f"gpu/ecc_{kind}_{span}", f"ECC {kind}, {span}", "", f"{kind} memory errors {since}", "lower", "sum")
        for span, since in (("volatile", "since the driver was loaded"), ("aggregate", "in the device's life"))
        for kind in ("corrected", "uncorrected")
    ),
    Metric("gpu/remapped_rows_corrected", "Rows remapped, corrected", "", "after correctable errors", "lower", "sum"),
    Metric(
        "gpu/remapped_rows_uncorrected", "Rows remapped, uncorrected", "", "after uncorrectable errors", "lower", "sum"
    ),
    Metric("gpu/remap_pending", "Remap pending", "", "1 when a row waits for a reset to be replaced", "lower", "max"),
    Metric("gpu/remap_failed", "Remap failed", "", "1 when a row could not be replaced", "lower", "max"),
    Metric("gpu/retired_pages_single", "Pages retired (single bit)", "", "after correctable errors", "lower", "sum"),
    Metric("gpu/retired_pages_double", "Pages retired (double bit)", "", "after uncorrectable errors", "lower", "sum"),
    Metric("gpu/xid", "Xid error", "", "code of an error that the driver reported at that moment", "lower", "max"),
    Metric(
        "gpu/process_memory_bytes", "GPU memory of this process", "B", "what this process itself holds", "lower", "max"
    ),
    Metric(
        "gpu/process_utilization_pct", "GPU utilization of this process", "%", "time in which its kernels ran", "higher"
    ),
    Metric(
        "gpu/other_memory_bytes",
        "GPU memory of others",
        "B",
        "what other processes hold on this device",
        "lower",
        "max",
    ),
    Metric("gpu/other_processes", "Other processes", "", "other processes on this device", "lower", "max"),
)

_ROWS: tuple[Metric, ...] = (
    Metric("loss", "Loss", "", "the loss that the optimizer minimises, unscaled", "lower"),
    Metric("lr", "Learning rate", "", "learning rate of the first parameter group", "neither"),
    Metric(
        "step_time_s", "Step time", "s", "from the end of one optimizer step to the end of the next", "lower", "max"
    ),
    Metric("samples_per_s", "Samples per second", "samples/s", "samples consumed, all ranks together", "higher", "sum"),
    Metric("tokens_per_s", "Tokens per second", "tokens/s", "tokens consumed, all ranks together", "higher", "sum"),
    Metric("mfu", "MFU", "", "model FLOPs utilization, a share of the device's dense peak", "higher"),
    Metric("flops_per_s", "FLOP/s", "FLOP/s", "the model's own arithmetic, all ranks together", "higher", "sum"),
    Metric(
        "sync/calls_per_step",
        "Synchronizing calls",
        "",
        "calls that made the host wait for the device, in a sampled step",
        "lower",
        "max",
    ),
    Metric(
        "sync/reads_per_step",
        "Values read one by one",
        "",
        "reads of single values of tensors on the CPU, in a sampled step",
        "lower",
        "max",
    ),
    Metric(
        "sync/reading_s",
        "Reading values one by one",
        "s",
        "time of a sampled step in loops that read single values of tensors on the CPU",
        "lower",
        "max",
    ),
    *(Metric(f"phase/{p}_s", _PHASE_MEANING[p][0], "s", _PHASE_MEANING[p][1], "lower", "mean") for p in PHASES),
    Metric("phase/compile_s", "Compiling", "s", "time in which torch.compile compiled", "lower", "mean"),
    Metric("compile/count", "Compilations", "", "how often torch.compile compiled a function", "lower", "max"),
    Metric(
        "compile/recompiles",
        "Recompilations",
        "",
        "compilations of a function that was compiled before, because a guard failed",
        "lower",
        "max",
    ),
    Metric(
        "compile/graph_breaks", "Graph breaks", "", "places where torch.compile had to split a graph", "lower", "max"
    ),
    Metric(
        "grad/norm",
        "Gradient norm",
        "",
        "global 2-norm of the gradients after unscaling, before clipping",
        "neither",
        "max",
        "grad/local_square_sum",
    ),
    Metric(
        "grad/local_square_sum",
        "Square sum of local gradients",
        "",
        "of sharded parameters: what this rank adds to the square of the gradient norm; what several ranks hold counts once",
        "neither",
        "sum",
    ),
    Metric(
        "grad/clipped_scaled",
        "Clipped before unscaling",
        "",
        "1 in a step whose gradients were clipped while they still carried the loss scale",
        "lower",
        "max",
    ),
    Metric("grad/zero_share", "Zero gradients", "", "share of the parameters whose gradient is all zero", "lower"),
    Metric(
        "grad/vanishing_share",
        "Vanishing gradients",
        "",
        "share of the parameters whose gradient has a root mean square below 1e-7 but is not zero",
        "lower",
    ),
    Metric(
        "update/ratio",
        "Update-to-weight ratio",
        "",
        "2-norm of what a step changed over that of the weights, from a sample of every parameter",
        "neither",
    ),
    Metric(
        "update/unmoved_share",
        "Parameters that stand still",
        "",
        "share of the trainable numbers that did not change over 20 steps or more, from a sample of every parameter",
        "lower",
    ),
    Metric(
        "params/unoptimized_share",
        "Parameters without an optimizer",
        "",
        "share of the trainable numbers that receive gradients and that no optimizer has",
        "lower",
        "max",
    ),
    Metric(
        "dead/share",
        "Dead units",
        "",
        "share of the units of ReLU modules that are zero in all of 64 rows or more",
        "lower",
    ),
    Metric(
        "grad/nonfinite",
        "Non-finite gradients",
        "tensors",
        "parameters whose gradient holds NaN or Inf",
        "lower",
        "sum",
    ),
    Metric(
        "batch/padding_pct",
        "Padding",
        "%",
        "share of the places of a batch of sequences that hold no token, from a sample of the batches",
        "lower",
    ),
    Metric(
        "batch/ignored_pct",
        "Labels left out",
        "%",
        "share of the labels that the loss leaves out (-100, or zero in a loss mask), from a sample of the batches",
        "neither",
    ),
    Metric(
        "batch/constant_pct",
        "Constant batches",
        "%",
        "share of the batches in which all rows of the input are the same, from a sample of the batches",
        "lower",
    ),
    Metric(
        "batch/one_class_pct",
        "Batches of one class",
        "%",
        "share of the batches in which all rows have the same class, from a sample of the batches",
        "lower",
    ),
    Metric("batch/input_mean", "Mean of the input", "", "of the numbers of a batch, from a sample of them"),
    Metric("batch/input_std", "Spread of the input", "", "standard deviation of the numbers of a batch, from a sample"),
    Metric(
        "batch/repeats",
        "Repeated batches",
        "batches",
        "batches so far that had come before in their epoch",
        "lower",
        "sum",
    ),
    Metric("batch/distinct", "Different batches", "batches", "different batches of the epoch so far", "neither"),
    Metric("batch/epoch", "Epoch", "", "number of the epoch that begins with the step", "neither", "max"),
    Metric("amp/scale", "Loss scale", "", "scale of the GradScaler", "neither", "min"),
    Metric("amp/skipped", "Skipped steps", "steps", "steps that the GradScaler skipped so far", "lower", "max"),
    Metric(
        "cuda/allocated_bytes", "Allocated GPU memory", "B", "live tensors in torch's caching allocator", "lower", "max"
    ),
    Metric("cuda/reserved_bytes", "Reserved GPU memory", "B", "held by torch's caching allocator", "lower", "max"),
    Metric(
        "cuda/active_bytes",
        "Active GPU memory",
        "B",
        "live tensors, and blocks that a stream may still use",
        "lower",
        "max",
    ),
    Metric("cuda/peak_allocated_bytes", "Peak GPU memory", "B", "highest allocation so far", "lower", "max"),
    Metric("cuda/peak_reserved_bytes", "Peak reserved GPU memory", "B", "most that torch held so far", "lower", "max"),
    Metric(
        "cuda/inactive_split_bytes", "Split GPU memory", "B", "free parts of blocks in use: splinters", "lower", "max"
    ),
    Metric(
        "cuda/fragmentation",
        "Fragmentation",
        "",
        "share of the reserved memory that no live tensor uses",
        "lower",
        "max",
    ),
    Metric(
        "cuda/headroom_bytes",
        "GPU memory headroom",
        "B",
        "free on the device, and reserved but unused",
        "higher",
        "min",
    ),
    Metric(
        "cuda/alloc_retries",
        "Allocation retries",
        "",
        "allocations that needed the cache emptied first",
        "lower",
        "sum",
    ),
    Metric("cuda/ooms", "Out-of-memory errors", "", "allocations that failed", "lower", "sum"),
    Metric("memory/parameters_bytes", "Parameter memory", "B", "parameters that this rank holds", "lower", "max"),
    Metric(
        "memory/gradients_bytes",
        "Gradient memory",
        "B",
        "gradients, at the size they have when they exist",
        "lower",
        "max",
    ),
    Metric(
        "memory/optimizer_state_bytes", "Optimizer memory", "B", "state of the optimizer on this rank", "lower", "max"
    ),
    Metric("memory/activations_and_other_bytes", "Activation memory", "B", "all else, at the peak", "lower", "max"),
    Metric(
        "memory/offloaded_bytes",
        "Offloaded memory",
        "B",
        "parameters, gradients and state kept elsewhere",
        "lower",
        "max",
    ),
    *_GPU,
    Metric("host/cpu_pct", "Host CPU", "%", "share of all cores of the host in use", "neither"),
    Metric("host/iowait_pct", "I/O wait", "%", "share of all cores that had to wait for a disk", "lower", "max"),
    Metric(
        "host/cores",
        "Cores",
        "",
        "cores that this process may use: its affinity and its group's quota",
        "neither",
        "sum",
    ),
    Metric(
        "host/cpu_throttled_pct",
        "CPU throttling",
        "%",
        "share of periods in which the quota was used up",
        "lower",
        "max",
    ),
    *(
        Metric(
            f"host/{name}_pressure_pct",
            f"{what} pressure",
            "%",
            f"time in which some task waited for {it}",
            "lower",
            "max",
        )
        for name, what, it in _PRESSURE
    ),
    Metric("host/memory_used_bytes", "Host memory", "B", "memory in use on the host", "lower", "max"),
    Metric(
        "host/memory_total_bytes", "Host memory size", "B", "memory of the host or its control group", "neither", "max"
    ),
    Metric(
        "host/oom_kills",
        "Out-of-memory kills",
        "",
        "processes of our group that the kernel killed so far",
        "lower",
        "sum",
    ),
    Metric("host/load1", "Load average", "", "runnable tasks, one-minute average", "neither", "max"),
    Metric("host/disk_read_bytes_per_s", "Disk read", "B/s", "read from all disks of the host", "neither", "sum"),
    Metric("host/disk_write_bytes_per_s", "Disk write", "B/s", "written to all disks of the host", "neither", "sum"),
    Metric("host/disk_busy_pct", "Disk busy", "%", "share of time in which the busiest disk worked", "lower", "max"),
    Metric("host/net_sent_bytes_per_s", "Network sent", "B/s", "sent over all interfaces", "neither", "sum"),
    Metric(
        "host/net_received_bytes_per_s", "Network received", "B/s", "received over all interfaces", "neither", "sum"
    ),
    Metric("process/cpu_pct", "Process CPU", "%", "CPU of the training process, 100 % is one core", "neither", "sum"),
    Metric("process/rss_bytes", "Process memory", "B", "resident memory of the training process", "lower", "sum"),
    Metric(
        "process/system_cpu_pct",
        "Time in the kernel",
        "%",
        "time that the training thread spends in the kernel, 100 % is one core",
        "lower",
        "max",
    ),
    Metric(
        "process/page_faults_per_step",
        "Page faults",
        "faults/step",
        "minor page faults of the training thread in a step: memory that the system hands out page by page",
        "lower",
        "max",
    ),
    Metric(
        "process/rss_file_bytes",
        "Mapped files",
        "B",
        "of it pages of files, given back when memory is short",
        "lower",
        "sum",
    ),
    Metric("process/threads", "Threads", "", "threads of the training process", "neither", "max"),
    Metric(
        "process/disk_read_bytes_per_s",
        "Process disk read",
        "B/s",
        "fetched from disks by this process",
        "neither",
        "sum",
    ),
    Metric(
        "process/disk_write_bytes_per_s", "Process disk write", "B/s", "sent to disks by this process", "neither", "sum"
    ),
    Metric(
        "process/workers", "Data workers", "", "processes that this one started: the loader's workers", "neither", "sum"
    ),
    Metric(
        "process/workers_cpu_pct", "Data workers CPU", "%", "CPU of the workers, 100 % is one core", "neither", "sum"
    ),
    Metric(
        "process/workers_rss_bytes", "Data workers memory", "B", "resident memory, shared pages in each", "lower", "sum"
    ),
    Metric(
        "process/workers_pss_bytes",
        "Data workers, memory of their own",
        "B",
        "a page that several processes share counts in parts; without files and shared memory; only on Linux, now and then",
        "lower",
        "sum",
    ),
    Metric(
        "process/workers_rss_file_bytes",
        "Mapped files, data workers",
        "B",
        "of it pages of files and of shared memory",
        "lower",
        "sum",
    ),
    *(
        row
        for role, what in (
            ("work", "the working directory"),
            ("spool", "the agent's spool"),
            ("checkpoint", "the checkpoints"),
        )
        for row in (
            Metric(
                f"disk/{role}_free_bytes", f"Free space, {role}", "B", f"free space where {what} is", "higher", "min"
            ),
            Metric(f"disk/{role}_used_pct", f"Disk used, {role}", "%", f"of the file system of {what}", "lower", "max"),
        )
    ),
    Metric(
        "agent/overhead_pct", "Agent overhead", "%", "CPU the agent takes, as a share of the step time", "lower", "max"
    ),
    Metric(
        "agent/dropped", "Dropped samples", "samples", "samples and events the agent had to drop so far", "lower", "sum"
    ),
)

CATALOGUE: dict[str, Metric] = {row.name: row for row in _ROWS}

FAMILIES: dict[str, Metric] = {
    row.name: row
    for row in (
        Metric(
            "grad_norm/", "Gradient norm", "", "2-norm of a layer's gradients after unscaling, before clipping", "neither", "max",
            "grad_square_sum/",
        ),
        Metric(
            "grad_square_sum/", "Square sum of local gradients", "",
            "of sharded parameters: what this rank adds to the square of a layer's gradient norm", "neither", "sum",
        ),
        Metric(
            "grad_nonfinite/", "Non-finite numbers", "", "numbers of a parameter's gradient that are NaN or Inf", "lower", "max",
        ),
        Metric("update_ratio/", "Update-to-weight ratio", "", "2-norm of a step's change over that of a layer's weights"),
        Metric("module_share/", "Share of forward", "", "share of the forward pass that a part of the model takes"),
        Metric("dead_share/", "Dead units", "", "share of an activation's units that are zero for a whole batch", "lower"),
    )
}  # fmt: skip


def metric(name: str) -> Metric:
    """The catalogue's row for a name; a node's other GPUs (`node_gpu3/power_w`) read like the rank's own."""
    row = CATALOGUE.get(name)
    if row is not None:
        return row
    own = CATALOGUE.get(re.sub(r"node_gpu\d+/", "gpu/", name)) if name.startswith("node_gpu") else None
    if own is not None:
        return Metric(
            name, f"{own.title} ({name.partition('/')[0]})", own.unit, own.meaning, own.better, own.over_ranks
        )
    group, slash, layer = name.partition("/")
    family = FAMILIES.get(group + slash)
    if family is not None and layer:
        parts = family.root_of + layer if family.root_of else ""
        return Metric(
            name, f"{family.title}: {layer}", family.unit, family.meaning, family.better, family.over_ranks, parts
        )
    return Metric(name, name, "", _BY_SCRIPT)


_WHOLES = {row.root_of: row.name for row in (*_ROWS, *FAMILIES.values()) if row.root_of}


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
