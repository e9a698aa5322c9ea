"""Which charts a run page shows, and in which order. On which of them an alert is marked, its rule says: the page asks the
server (GET /rules). No data and no plotly here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from perfagent.wire import CATALOGUE, FAMILIES, PHASES
from perfagent_dashboard.words import title_of

__all__ = ["CHARTS", "HIDDEN", "Chart", "chart_table"]


@dataclass(frozen=True, slots=True)
class Chart:
    """name: a metric of the catalogue; group: the section, which stands in one tab; from_zero: the vertical axis starts at
    0."""

    name: str
    group: str
    from_zero: bool = False


_ZERO = True

# The order is that of the page: first what training is about, then its speed, then what it runs on. A metric that is
# not listed (logged by the script) comes after the training block; what else the agent sends comes last, in the
# catalogue's order.
_FIRST: tuple[Chart, ...] = (
    Chart("loss", "training"),
    Chart("grad/norm", "training", _ZERO),
    Chart("tokens_per_s", "training", _ZERO),
    Chart("samples_per_s", "training", _ZERO),
    Chart("step_time_s", "speed", _ZERO),
    Chart("phase/data_s", "speed", _ZERO),
    Chart("lr", "training", _ZERO),
    Chart("mfu", "speed", _ZERO),
    Chart("gpu/utilization_pct", "device", _ZERO),
    Chart("gpu/memory_used_bytes", "device"),
    Chart("gpu/power_w", "device", _ZERO),
    Chart("gpu/temperature_c", "device"),
    Chart("gpu/sm_clock_mhz", "device"),
    Chart("cuda/allocated_bytes", "device"),
    Chart("cuda/reserved_bytes", "device"),
    Chart("cuda/peak_allocated_bytes", "device"),
    Chart("amp/scale", "training"),
    Chart("amp/skipped", "training", _ZERO),
    *(Chart(f"phase/{phase}_s", "speed", _ZERO) for phase in PHASES if phase != "data"),
    Chart("phase/compile_s", "speed", _ZERO),
    Chart("compile/recompiles", "speed", _ZERO),
    Chart("compile/graph_breaks", "speed", _ZERO),
    Chart("compile/count", "speed", _ZERO),
    Chart("grad/nonfinite", "training", _ZERO),
    Chart("grad/zero_share", "training", _ZERO),
    Chart("grad/vanishing_share", "training", _ZERO),
    Chart("update/ratio", "training"),
    Chart("dead/share", "training", _ZERO),
    Chart("host/cpu_pct", "host", _ZERO),
    Chart("host/memory_used_bytes", "host"),
    Chart("process/cpu_pct", "host", _ZERO),
    Chart("process/rss_bytes", "host"),
    Chart("host/load1", "host", _ZERO),
    Chart("host/disk_read_bytes_per_s", "host", _ZERO),
    Chart("host/disk_write_bytes_per_s", "host", _ZERO),
    Chart("host/net_sent_bytes_per_s", "host", _ZERO),
    Chart("host/net_received_bytes_per_s", "host", _ZERO),
    Chart("process/threads", "host", _ZERO),
    Chart("cuda/alloc_retries", "device", _ZERO),
    Chart("cuda/ooms", "device", _ZERO),
    Chart("agent/overhead_pct", "host", _ZERO),
    Chart("agent/dropped", "host", _ZERO),
)

# Constants of the machine and edges of an interval: they are the second half of a figure ("69 of 80 GiB"), not a curve.
# And what only its sum over ranks says: that is `grad/norm`.
HIDDEN = (
    "disk/checkpoint_free_bytes",
    "disk/spool_free_bytes",
    "disk/work_free_bytes",
    "gpu/memory_total_bytes",
    "gpu/memory_used_max_bytes",
    "gpu/memory_used_min_bytes",
    "gpu/pcie_link_generation",
    "gpu/pcie_link_width",
    "gpu/power_limit_w",
    "gpu/power_max_w",
    "gpu/power_min_w",
    "gpu/sm_clock_max_mhz",
    "gpu/sm_clock_min_mhz",
    "gpu/utilization_max_pct",
    "gpu/utilization_min_pct",
    "grad/local_square_sum",
    "host/cores",
    "host/memory_total_bytes",
)
_GROUPS = {"gpu": "device", "cuda": "device", "host": "host", "process": "host", "disk": "host", "memory": "host"}


def _rest() -> tuple[Chart, ...]:
    placed = {*HIDDEN, *(chart.name for chart in _FIRST)}
    left = [metric for name, metric in CATALOGUE.items() if name not in placed]
    return tuple(Chart(one.name, _GROUPS.get(one.name.split("/")[0], "speed"), one.unit == "%") for one in left)


CHARTS: tuple[Chart, ...] = (*_FIRST, *_rest())


def chart_table(language: str) -> dict[str, Any]:
    """What the script assets need to know, ready for JSON: metrics with title and unit, charts in order."""
    return {
        "metrics": {
            name: {
                "title": title_of(name, language),
                "unit": row.unit,
                "meaning": row.meaning,
                "better": row.better,
                "over": row.over_ranks,
            }
            for name, row in CATALOGUE.items()
        },
        "charts": [asdict(chart) for chart in CHARTS],
        "phases": list(PHASES),
        "hidden": [*HIDDEN, *FAMILIES],  # what ends in a slash is a prefix
    }
