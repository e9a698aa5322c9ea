"""cpu_oversubscribed: more threads want to run than there are cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from perfagent.wire import Finding
from perfagent_server.rules.rule import UNKNOWN, Every, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.speed import bounds, cpu_load
from perfagent_server.rules.speed.bounds import bound_figures, what_bounds
from perfagent_server.rules.speed.cpu_load import PRESSURE, THROTTLED, ranks_of_nodes
from perfagent_server.rules.speed.step_shares import UTILIZATION, busy_pct
from perfagent_server.rules.speed.while_stepping import Typical, while_stepping_by_rank
from perfagent_server.rules.window import Window

__all__ = ["CpuOversubscribed"]

_THREADS = "process/threads"


class _Node(NamedTuple):
    """How long tasks wait for a core on a node; pressure and throttled in percent of the time."""

    node: tuple[int, tuple[int, ...]]
    pressure: float
    throttled: float
    over_s: float


@dataclass(frozen=True, kw_only=True)
class CpuOversubscribed(Rule):
    """Tasks wait for a core (the kernel's pressure stall information, of the control group if it has a limit), or the
    group's CPU quota runs out.

    If 75 % or more of the busy cores' time is of the run's own processes and loader workers, the load is its own; that
    of others no setting of the run cures. A little pressure is info: workers that wake up wait for a moment, and steps
    hardly do. A quota limits the run's group alone. If the GPUs are always busy, nothing waits for the cores.
    """

    pressure_pct: float = 40.0
    throttled_pct: float = 10.0
    warning_pressure_pct: float = 70.0
    warning_throttled_pct: float = 25.0
    busy_pct: float = 90.0
    for_s: float = within(20.0, least=1, most=180)
    clear_at: float = 0.8  # of the threshold

    id = "cpu_oversubscribed"
    severities = ("info", "warning")
    question = Question.IS_IT_FAST
    after = ("allocator_churn",)
    reads = (
        Every(5.0),
        PRESSURE,
        THROTTLED,
        *cpu_load.READS,
        *bounds.READS,
        UTILIZATION,
        Series(_THREADS, keep=2, axis="time", ranks="apart"),
    )
    charts = (PRESSURE.name, THROTTLED.name, "host/cpu_pct")
    profile_helps = True
    level = "for_s"
    life = Life(clear_s=60.0, restated=True)

    def judge(self, window: Window) -> Finding | Unknown | None:
        if not {PRESSURE.name, THROTTLED.name} & window.by_time.keys():
            return None
        took = window.series("step_time_s")
        if took is None or took.time is None:
            return None
        worst = max(_nodes(window, self.for_s), key=self._times_too_much, default=None)
        if worst is None:
            return UNKNOWN
        slack = self.clear_at if window.is_firing(self.id) else 1.0
        is_throttled = worst.throttled >= slack * self.throttled_pct
        if not is_throttled and worst.pressure < slack * self.pressure_pct:
            return None
        busy = busy_pct(window, took.time, self.for_s)
        if busy is not None and busy >= self.busy_pct:
            return None
        load = cpu_load.cpu_load(window, worst.node, took.time - 2 * self.for_s, took.time)
        if load is None:
            return UNKNOWN
        cause = "quota" if is_throttled else "other programs" if not load.is_own else ""
        cause = cause or ("workers" if load.workers >= 0.5 * load.own else "")
        counted, ranks = window.readings(_THREADS).newest_by_rank(), len(load.ranks)
        threads = sum(counted.get(rank, 0.0) for rank in load.ranks)
        at_most = max(1, int(load.cores // max(1, ranks)))
        is_much = worst.throttled >= self.warning_throttled_pct or worst.pressure >= self.warning_pressure_pct
        return self.found(
            "warning" if is_much and cause != "other programs" else "info",
            cause=cause,
            since_step=window.at,
            ranks=list(load.ranks) if window.world_size > 1 else [],
            evidence={
                "pressure_pct": worst.pressure, "throttled_pct": worst.throttled, "over_s": worst.over_s, "cores": load.cores,
                "busy_cores": load.busy, "own_cores": load.own, "workers_cores": load.workers, "other_cores": load.others,
                "threads": threads or None, "ranks": ranks, "whose": "others" if cause == "other programs" else "own",
                "omp_num_threads": at_most, **bound_figures(what_bounds(window)),
            },
        )  # fmt: skip

    def _times_too_much(self, node: _Node) -> float:
        """As a multiple of its own threshold, in units of both."""
        return max(node.pressure * self.throttled_pct, node.throttled * self.pressure_pct)


def _nodes(window: Window, for_s: float) -> list[_Node]:
    """Those that have told enough."""
    pressures, quotas = (while_stepping_by_rank(window, one.name, for_s) for one in (PRESSURE, THROTTLED))
    nodes = {speaker: (speaker, ranks) for speaker, ranks in ranks_of_nodes(window)}
    found, untold = [], Typical(0.0, 0.0, 0.0)
    for speaker in nodes.keys() & (pressures.keys() | quotas.keys()):
        pressure, quota = pressures.get(speaker, untold), quotas.get(speaker, untold)
        found.append(_Node(nodes[speaker], pressure.mean, quota.mean, max(pressure.over_s, quota.over_s)))
    return found
