"""docs/reference/metrics.md: each metric of the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from perfagent.wire.metrics import CATALOGUE, FAMILIES, Metric
from references.markdown import note, table

__all__ = ["metrics"]

_HEAD = """# Metrics

{note}
Every metric that perfagent records by itself: its name, unit and meaning. The same name stands on the wire, in the database, in
charts, in `perfagent export` and in `client.series(run, name)`. Metrics that your script logs have the names that you give them.

- **Better** says which direction is an improvement. `perfagent compare` and `perfagent gate` read it.
- **Over ranks** says how the values of all ranks become one value of the run. Charts can also show each rank.
- A metric is missing where its source is missing: GPU metrics need a GPU, `mfu` needs a device whose peak FLOP/s is known, and
  `batch/` metrics need a loader or a batch that perfagent can read.
- A name that ends in `_s` is in seconds, `_pct` in percent, `_bytes` in bytes, `_c` in degrees Celsius, `_w` in watts.

## What a metric tells, and what it does not

- **Gradient norm**, `grad/norm` (grad_norm): the length of all gradients together, the root of the sum of their squares, which
  `clip_grad_norm_` returns. High at the start and falling is normal. What counts is a jump (spike) above its own usual values. A
  norm of inf now and then under fp16 is the GradScaler, which skips that step.
- **GPU utilization**, `gpu/utilization_pct`: GPU-Util of nvidia-smi, the share of time in which any kernel ran, not how full the
  GPU was. 100 % can be one small kernel, or a collective that waits. `gpu/sm_active_pct`, `gpu/sm_occupancy_pct` and `mfu` tell
  more; on MIG devices some are missing. The source is NVML, not DCGM; a value comes every second.
- **MFU**, `mfu`: the FLOPs of the model in a step, counted from its operators, divided by step time and the dense peak of the
  device. Large models that train well reach 0.3 to 0.5, small ones far less.
- **Memory**, `cuda/allocated_bytes` and `cuda/reserved_bytes`: live tensors; and all that torch's cache has taken, which may be
  much larger. nvidia-smi (`gpu/memory_used_bytes`) also has the CUDA context and other processes. High memory with low
  utilization: the model fits, but waits for [data or the CPU](../symptoms/gpu-idle.md).
- **Time and throughput**, `step_time_s`, `phase/data_s`, `samples_per_s`: seconds of an iteration, its wait for data (`data_time`
  in other logs), and the samples of all ranks in a step ÷ its step time. There is no eta.
- **RSS and CPU usage**, `process/rss_bytes`, `process/cpu_pct`: of the main process only. Its loader workers are
  `process/workers_rss_bytes`, the machine is `host/cpu_pct`.
"""

_SECTIONS: tuple[tuple[str, str, Callable[[str], bool]], ...] = (
    ("Loss, speed and efficiency", "", lambda group: group == ""),
    (
        "Phases of a step",
        "Where the time of a step goes. The phases of a step add up to its step time.",
        {"phase", "compile"}.__contains__,
    ),
    (
        "Gradients, updates and numerics",
        "Measured in sampled steps: the agent measures less often where that would cost more than 0.5 % of a step.",
        {"grad", "update", "amp", "params", "dead"}.__contains__,
    ),
    ("Batches", "What the batches of the training contain.", {"batch"}.__contains__),
    ("Values that the host reads from the device", "", {"sync"}.__contains__),
    ("GPU memory of the process", "As torch's allocator counts it.", {"cuda", "memory"}.__contains__),
    (
        "GPU",
        "From NVML, or from the kernel's files for AMD and Intel. Other GPUs of a node have the same names, below `node_gpu0/`.",
        {"gpu"}.__contains__,
    ),
    ("Host", "The machine, or the container where limits apply.", {"host", "disk"}.__contains__),
    (
        "Process",
        "The training process and its children, such as the workers of a DataLoader.",
        {"process"}.__contains__,
    ),
    ("The agent itself", "What perfagent costs, and what it had to drop.", {"agent"}.__contains__),
)


def metrics() -> str:
    """The page. Raises ValueError for a metric that belongs to no section."""
    left = dict(CATALOGUE)
    parts = [_HEAD.format(note=note("agent/perfagent/wire/metrics.json"))]
    for title, text, has in _SECTIONS:
        rows = [left.pop(name) for name in [*left] if has(name.partition("/")[0] if "/" in name else "")]
        parts.append(f"## {title}\n\n{text + chr(10) * 2 if text else ''}{_table(rows)}")
    if left:
        raise ValueError(f"no section of the page has {', '.join(left)}")
    parts.append(
        f"## By layer\n\nOne series for each layer: `grad_norm/encoder.0.weight`.\n\n{_table(FAMILIES.values())}"
    )
    return "\n".join(parts)


def _table(rows: Iterable[Metric]) -> str:
    return table(
        ("name", "unit", "meaning", "better", "over ranks"),
        ((f"`{row.name}`", row.unit, f"{row.title}: {row.meaning}", row.better, row.over_ranks) for row in rows),
    )
