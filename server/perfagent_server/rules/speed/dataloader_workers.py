"""dataloader_workers: the number of loader workers does not fit the cores of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from perfagent.wire import Finding, Severity
from perfagent_server.rules.rule import Every, Life, Question, Rule, within
from perfagent_server.rules.speed import bounds, loader_cores
from perfagent_server.rules.speed.bounds import bound_figures, what_bounds
from perfagent_server.rules.window import Window

__all__ = ["DataloaderWorkers"]

_BUSY_PCT = 90.0


@dataclass(frozen=True, kw_only=True)
class DataloaderWorkers(Rule):
    """Too many workers (SageMaker Debugger's rule has 200 % of the cores), or too few while the step waits.

    Only a wait makes it a warning, which joins that of `data_bound`. While the step waits, workers are too many only where
    no core idles. Few workers that deliver in time are enough, and no number is advised for which there is no core.
    """

    many_pct: float = within(200.0, most=10_000)
    wait_pct: float = 10.0
    warning_wait_pct: float = 33.0
    least_wait_s: float = 0.001
    least_steps: int = 30
    clear_at: float = 0.8  # of the threshold

    id = "dataloader_workers"
    severities = ("info", "warning")
    question = Question.IS_IT_FAST
    after = ("cpu_bottleneck",)
    reads = (Every(5.0), *loader_cores.READS, *bounds.READS)
    charts = (loader_cores.WORKERS, "phase/data_s")
    profile_helps = True
    level = "least_steps"
    life = Life(for_s=10.0, clear_s=30.0, restated=True)
    joins = ("data_bound",)

    def judge(self, window: Window) -> Finding | None:
        machine = loader_cores.loader_cores(window)
        took = window.series("step_time_s")
        if machine is None or took is None or took.total < self.least_steps:
            return None
        slack = self.clear_at if window.is_firing(self.id) else 1.0
        is_many = 100 * machine.workers >= slack * self.many_pct * machine.cores
        if not is_many and "phase/data_s" not in window.by_step:
            return None
        bound = what_bounds(window)
        wait_pct = 0.0 if bound is None else bound.shares_pct.get("data", 0.0)
        busy = bound.roofline.busy_pct if bound is not None else None
        waits = (
            bound is not None
            and wait_pct >= slack * self.wait_pct
            and wait_pct / 100 * bound.step_p50_s >= self.least_wait_s
            and (busy is None or busy < _BUSY_PCT)
        )
        is_loud, wanted = wait_pct >= self.warning_wait_pct, machine.wanted(wait_pct / 100)
        too_many = loader_cores.take_turns(window, machine, took.time) if waits and took.time else is_many
        if not too_many and (not waits or wanted <= machine.of_rank):
            return None
        figures: dict[str, object] = {
            "workers": machine.workers, "cores": machine.cores, "ranks": machine.ranks, "workers_of_a_rank": machine.of_rank,
            "workers_pct": 100 * machine.workers / machine.cores, **bound_figures(bound),
        }  # fmt: skip
        if bound is None or too_many:
            figures["advised_workers"] = machine.free
            return self.found("warning" if waits and is_loud else "info", since_step=window.at, evidence=figures)
        figures |= {"advised_workers": wanted, "share_pct": wait_pct}
        figures |= {"room_workers": machine.free, "steps": bound.steps}
        severity: Severity = "warning" if is_loud else "info"
        return self.found(severity, cause="too few", since_step=window.at, evidence=figures, gain_pct=wait_pct)
