"""cpu_bottleneck: the GPUs idle while all cores are busy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfagent.wire import Finding
from perfagent_server.rules.rule import UNKNOWN, Every, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.speed import bounds, cpu_load
from perfagent_server.rules.speed.bounds import bound_figures, what_bounds
from perfagent_server.rules.speed.cpu_load import BUSY, ranks_of_nodes
from perfagent_server.rules.time_series import Seconds
from perfagent_server.rules.window import Window

__all__ = ["CpuBottleneck"]

_GPU = "gpu/utilization_pct"


@dataclass(frozen=True, kw_only=True)
class CpuBottleneck(Rule):
    """The rule of SageMaker Debugger: CPU above 90 %, GPU below 10 %, in more than half of the samples. Our GPU
    threshold is higher: a loader that delivers now and then does not hide behind it.

    Without a GPU it is silent: a training on the CPU keeps its cores busy.
    """

    cpu_above_pct: float = 90.0
    gpu_below_pct: float = 30.0
    samples_pct: float = 50.0
    for_s: float = within(120.0, least=1, most=150)
    clear_at: float = 0.8  # of the share of samples

    id = "cpu_bottleneck"
    severities = ("info", "warning")
    question = Question.IS_IT_FAST
    after = ("host_bound",)
    reads = (Every(10.0), Series(_GPU, keep=150, axis="time"), *cpu_load.READS, *bounds.READS)
    charts = (BUSY.name, _GPU)
    profile_helps = True
    level = "for_s"
    life = Life(clear_s=60.0, restated=True)
    needs_card = True

    def judge(self, window: Window) -> Finding | Unknown | None:
        gpu, took = window.by_time.get(_GPU), window.series("step_time_s")
        if gpu is None or took is None or took.time is None:
            return None
        utilization = gpu.seconds()
        since = took.time - self.for_s
        slack = self.clear_at if window.is_firing(self.id) else 1.0
        unknown = True
        for node in ranks_of_nodes(window):
            load = cpu_load.cpu_load(window, node, since, took.time)
            cores = window.by_time[BUSY.name].seconds(node[0])
            if load is None or took.time - cores.second[0] < 0.9 * self.for_s:
                continue
            unknown = False
            both = _both(cores, utilization, since, own_pct=100 * load.own / load.cores)
            if both is None:
                continue
            cpu, idle = both
            share = 100 * float(np.mean((cpu > self.cpu_above_pct) & (idle < self.gpu_below_pct)))
            if share < slack * self.samples_pct:
                continue
            bound = what_bounds(window)
            loads = (bound is not None and bound.kind == "data") or load.workers >= 0.5 * load.own
            return self.found(
                "warning" if load.is_own else "info",
                cause="other programs" if not load.is_own else "data" if loads else "",
                since_step=window.at,
                evidence={
                    "samples_pct": share, "readings": len(cpu), "cpu_pct": float(cpu.mean()),
                    "utilization_pct": float(idle.mean()), "idle_pct": 100 - float(idle.mean()), "cores": load.cores,
                    "busy_cores": load.busy, "own_cores": load.own, "workers_cores": load.workers, "other_cores": load.others,
                    **bound_figures(bound),
                },
            )  # fmt: skip
        return UNKNOWN if unknown else None


def _both(cores: Seconds, gpu: Seconds, since: float, own_pct: float) -> tuple[np.ndarray, np.ndarray] | None:
    """Of the seconds of stepping of which both is known: how busy the cores were, and the GPUs, in percent. own_pct: of the
    cores that the run may use, by its own processes: more than all cores of the machine tell where it may use only some."""
    _, of_cores, of_gpu = np.intersect1d(cores.second, gpu.second, return_indices=True)
    within = (cores.second[of_cores] >= since) & cores.stepping[of_cores]
    of_cores, of_gpu = of_cores[within], of_gpu[within]
    if len(of_cores) < 10:
        return None
    cpu = cores.total[of_cores] / cores.count[of_cores]
    return np.maximum(cpu, own_pct), gpu.total[of_gpu] / gpu.count[of_gpu]
