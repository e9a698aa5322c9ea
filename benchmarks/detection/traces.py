"""The traces of ByteDance's StragglerAnalysis as runs of many ranks.

A trace holds the operations of some steps of every worker that was traced (one of each tensor-parallel group). A worker
becomes a rank: its forward and backward compute and its optimizer are phases, and what is left of the step is waiting
for others, which is communication. The steps were sampled from a longer run; they are judged as though they followed
each other. The stage of the pipeline stands in the first event of each rank.

What was wrong is said by ms-*.json and mw-*.json: the slowdown of the job (tori over tideal), and how much of it stays
when the slowest stage, or the slowest worker, is put right (Ms, Mw: the share that this removes).
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass

import pyarrow.parquet as parquet
from records import DATA

from perfagent.wire import Event
from perfagent_server.backtest.moment import Moment
from perfagent_server.diagnosis.moments import EPOCH

__all__ = ["Trace", "read_trace"]

_PHASE_OF = {
    "forward-compute": "phase/forward_s", "backward-compute": "phase/backward_s", "optimizer": "phase/optimizer_s",
    "optimizer-clip-main-grad": "phase/optimizer_s",
}  # fmt: skip
_MOST_OF_IT = 0.5
"""Of the slowdown that must go when the slowest worker, or the slowest stage, is put right, for it to be the cause."""


@dataclass(frozen=True, slots=True)
class Trace:
    """stages: pipeline stage of each rank; workers: worker of the trace behind each rank; slow: ranks that the labels and
    the compute times name as slowed, none where the cause is another; rules: that must name a cause of it."""

    name: str
    moments: list[Moment]
    stages: list[int]
    workers: list[int]
    slow: list[int]
    rules: tuple[str, ...]

    @property
    def steps(self) -> int:
        return len({moment.step for moment in self.moments if moment.values})


def read_trace(name: str) -> Trace:
    """name: "AR" or "SE"."""
    table = parquet.read_table(DATA / "stragglers" / f"trace-{name}.parquet")
    columns = {
        column: table[column].to_pylist() for column in ("rank", "stage", "step", "optype", "start_ts", "duration")
    }
    stage_of = dict(zip(columns["rank"], columns["stage"], strict=True))
    workers = sorted(stage_of)
    rank_of = {worker: rank for rank, worker in enumerate(workers)}
    spent: dict[int, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
    whole: dict[int, float] = defaultdict(float)
    for worker, step, kind, start, took in zip(
        *(columns[one] for one in ("rank", "step", "optype", "start_ts", "duration")), strict=True
    ):
        whole[step] = max(whole[step], start + took)
        if kind in _PHASE_OF:
            spent[step][rank_of[worker]][_PHASE_OF[kind]] += took
    stages = [stage_of[worker] for worker in workers]
    moments = _moments(spent, whole, stages)
    own = [sum(sum(of_rank[rank].values()) for of_rank in spent.values()) for rank in range(len(workers))]
    slow = [max(range(len(own)), key=own.__getitem__)] if _is_cause(name, "Mw") else []
    rules = ("straggler",) * bool(slow) + ("stage_imbalance",) * _is_cause(name, "Ms")
    return Trace(name, moments, stages, workers, slow, rules)


def _moments(spent: dict[int, dict[int, dict[str, float]]], whole: dict[int, float], stages: list[int]) -> list[Moment]:
    moments = [
        Moment(EPOCH, rank=rank, events=(Event(kind="state", time=EPOCH, data=_started(rank, stage, len(stages))),))
        for rank, stage in enumerate(stages)
    ]
    time = EPOCH
    for number, step in enumerate(sorted(whole), 1):
        time += whole[step]
        for rank in range(len(stages)):
            phases = dict(spent[step][rank])
            phases["phase/comm_s"] = max(0.0, whole[step] - sum(phases.values()))
            moments.append(Moment(time, number, {"step_time_s": whole[step], **phases}, rank=rank))
    return moments


def _started(rank: int, stage: int, world_size: int) -> dict[str, object]:
    return {"state": "running", "rank": rank, "world_size": world_size, "pipeline_stage": stage}


def _is_cause(name: str, label: str) -> bool:
    """label: Mw, of the slowest worker, or Ms, of the slowest stage."""
    told = json.loads((DATA / "stragglers" / f"{label.lower()}-{name}.json").read_text("utf-8"))
    return bool(told[label] >= _MOST_OF_IT)
