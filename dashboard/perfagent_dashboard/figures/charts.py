"""Which charts a run page shows, and in which order. On which of them an alert is marked, its rule says: the page asks the
server (GET /rules). No data and no plotly here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from perfagent.wire import CATALOGUE, FAMILIES, PHASES, Metric
from perfagent_dashboard.words import title_of

__all__ = ["CHARTS", "HIDDEN", "Chart", "chart_table"]


@dataclass(frozen=True, slots=True)
class Chart:
    """name: a metric of the catalogue; group: the section, which stands in one tab; from_zero: the vertical axis starts at
    0."""

    name: str
    group: str
    from_zero: bool = False


# In the order of the page. What the script logs comes after the training block; what else the agent sends comes last, in the
# catalogue's order.
_FIRST = {
    "training": (
        "loss", "grad/norm", "tokens_per_s", "samples_per_s", "lr", "amp/scale", "amp/skipped", "grad/nonfinite",
        "grad/zero_share", "grad/vanishing_share", "update/ratio", "dead/share",
    ),
    "speed": (
        "step_time_s", "phase/data_s", "mfu", *(f"phase/{phase}_s" for phase in PHASES if phase != "data"), "phase/compile_s",
        "compile/recompiles", "compile/graph_breaks", "compile/count",
    ),
    "device": (
        "gpu/utilization_pct", "gpu/memory_used_bytes", "gpu/power_w", "gpu/temperature_c", "gpu/sm_clock_mhz",
        "cuda/allocated_bytes", "cuda/reserved_bytes", "cuda/peak_allocated_bytes", "cuda/alloc_retries", "cuda/ooms",
    ),
    "host": (
        "host/cpu_pct", "host/memory_used_bytes", "process/cpu_pct", "process/rss_bytes", "host/load1",
        "host/disk_read_bytes_per_s", "host/disk_write_bytes_per_s", "host/net_sent_bytes_per_s",
        "host/net_received_bytes_per_s", "process/threads", "agent/overhead_pct", "agent/dropped",
    ),
}  # fmt: skip
_NOT_FROM_ZERO = ("loss", "amp/scale", "update/ratio")
_UNITS_NOT_FROM_ZERO = ("B", "°C", "MHz")

# Constants of the machine and edges of an interval: they are the second half of a figure ("69 of 80 GiB"), not a curve.
# And what only its sum over ranks says: that is `grad/norm`.
HIDDEN = (
    "disk/checkpoint_free_bytes", "disk/spool_free_bytes", "disk/work_free_bytes", "gpu/memory_total_bytes",
    "gpu/memory_used_max_bytes", "gpu/memory_used_min_bytes", "gpu/pcie_link_generation", "gpu/pcie_link_width",
    "gpu/power_limit_w", "gpu/power_max_w", "gpu/power_min_w", "gpu/sm_clock_max_mhz", "gpu/sm_clock_min_mhz",
    "gpu/utilization_max_pct", "gpu/utilization_min_pct", "grad/local_square_sum", "host/cores", "host/memory_total_bytes",
)  # fmt: skip
_GROUPS = {"gpu": "device", "cuda": "device", "host": "host", "process": "host", "disk": "host", "memory": "host"}


def _charts() -> Iterator[Chart]:
    for group, names in _FIRST.items():
        for name in names:
            yield Chart(name, group, name not in _NOT_FROM_ZERO and CATALOGUE[name].unit not in _UNITS_NOT_FROM_ZERO)
    placed = {*HIDDEN, *(name for names in _FIRST.values() for name in names)}
    for one in CATALOGUE.values():
        if one.name not in placed:
            yield Chart(one.name, _GROUPS.get(one.name.split("/")[0], "speed"), one.unit == "%")


CHARTS: tuple[Chart, ...] = (*_charts(),)


def chart_table(language: str) -> dict[str, Any]:
    """What the script assets need to know, ready for JSON, without what is empty."""
    return {
        "metrics": {name: _described(row, language) for name, row in CATALOGUE.items()},
        "charts": [_filled(asdict(chart)) for chart in CHARTS],
        "phases": list(PHASES),
        "hidden": [*HIDDEN, *FAMILIES],  # what ends in a slash is a prefix
    }


def _described(row: Metric, language: str) -> dict[str, Any]:
    over = "sum" if row.over_ranks == "sum" else ""
    return _filled({"title": title_of(row.name, language), "unit": row.unit, "meaning": row.meaning, "over": over})


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value}
