"""Precision, recall and latency of every rule on the recorded runs of tests/data, and on faults put into them.

    scripts/detection [--quick] [--jobs N] [--report]

Writes benchmarks/results/detection.json with what was measured, docs/evidence/detection.md from it, and measured.json of
the rules, from which docs/reference/rules.md has the figures of each rule. --report writes the documents again without
measuring, from the newest benchmarks/results/detection.json and demo_faults.json. Ends with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import detection_report
import gpu_jobs
from incidents import INCIDENTS, look_at
from injected import FAULTS, Fault, try_out
from records import Record, chosen_on, curves, mlperf, scaled
from traces import read_trace

from perfagent_server.backtest.replay import replay
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.plan import Plan

RESULTS = Path(__file__).resolve().parents[1] / "results" / "detection.json"
QUICK_DRAWS, QUICK_RUNS = 5, 4
TRACES = ("AR", "SE")

Task = Callable[[], dict[str, Any]]


def main() -> int:
    arguments = argparse.ArgumentParser(prog="scripts/detection", description=__doc__.partition("\n")[0])
    arguments.add_argument("--quick", action="store_true", help="few runs and few faults: whether it works")
    arguments.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: all cores)"
    )
    arguments.add_argument("--report", action="store_true", help="write the documents again without measuring")
    chosen = arguments.parse_args()
    if chosen.report and not RESULTS.exists():
        sys.exit(
            "scripts/detection: there is no benchmarks/results/detection.json yet; measure first, without --report"
        )
    found = json.loads(RESULTS.read_text("utf-8")) if chosen.report else measure(quick=chosen.quick, jobs=chosen.jobs)
    if chosen.quick:
        for section, text in detection_report.sections(found).items():
            print(f"## {section}\n\n{text}\n")
    else:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        detection_report.write(found)
    missed = [target for target, _, met in detection_report.targets(found) if met == "no"]
    for target in missed:
        sys.stderr.write(f"missed: {target}\n")
    return 1 if missed else 0


def measure(*, quick: bool, jobs: int) -> dict[str, Any]:
    tasks: list[tuple[str, Task]] = []
    for kind in ("curves", "mlperf", "scaled"):
        count = len(_records(kind))
        tasks += [
            ("healthy", partial(healthy, kind, place)) for place in range(min(count, QUICK_RUNS) if quick else count)
        ]
    rules = {rule.id for rule in all_rules()}
    tasks += [
        ("faults", partial(fault, place, chosen=group, draws=QUICK_DRAWS if quick else one.draws))
        for place, one in enumerate(FAULTS)
        if one.rule in rules
        for group in (True, False)
    ]
    tasks += [("incidents", partial(incident, place)) for place in range(len(INCIDENTS))]
    tasks += [("traces", partial(trace, name)) for name in TRACES]
    tasks += [("gpu_jobs", partial(gpu_job, name)) for name in gpu_jobs.TRUTH]
    found: dict[str, Any] = {"day": datetime.datetime.now(datetime.UTC).date().isoformat()}
    found |= {part: [] for part, _ in tasks}
    with ProcessPoolExecutor(max(1, jobs)) as pool:
        running = [(part, pool.submit(task)) for part, task in tasks]
        for number, (part, future) in enumerate(running, 1):
            found[part].append(future.result())
            sys.stderr.write(f"\r{number}/{len(running)} {part:10}")
    sys.stderr.write("\n")
    found["faults"] = [one for one in found["faults"] if one["total"]]
    return found


def _records(kind: str) -> Sequence[Record]:
    return {"curves": curves, "mlperf": mlperf, "scaled": scaled}[kind]()


def healthy(kind: str, place: int) -> dict[str, Any]:
    """All rules on a run in which nothing went wrong."""
    record = _records(kind)[place]
    judged = replay(record.moments, Plan(all_rules()))
    if judged.failed:
        raise next(iter(judged.failed.values()))
    series = sorted({name for moment in record.moments for name in moment.values})
    alerts = [dataclasses.asdict(alert) for alert in judged.alerts]
    return {
        "run": record.name, "family": record.family, "kind": kind, "steps": judged.steps, "series": series, "alerts": alerts,
    }  # fmt: skip


def fault(place: int, *, chosen: bool, draws: int) -> dict[str, Any]:
    """A fault in the families on which thresholds of its rule were chosen, or in the others."""
    one: Fault = FAULTS[place]
    known = scaled() if "amp/scale" in one.needs else [*curves(), *mlperf()]
    records = [record for record in known if chosen_on(one.rule, record.family) is chosen]
    outcome = try_out(one, records, draws)
    return {
        "fault": one.name, "rule": one.rule, "within": one.within, "needs": list(one.needs), "chosen": chosen,
        "found": outcome.found, "total": outcome.total, "latencies": sorted(outcome.latencies), "early": outcome.early,
    }  # fmt: skip


def incident(place: int) -> dict[str, Any]:
    one = INCIDENTS[place]
    seen = [{**dataclasses.asdict(each), "in_time": each.in_time} for each in look_at(one)]
    return {"incident": one.name, "began": one.began, "seen": seen}


def trace(name: str) -> dict[str, Any]:
    """All rules on a job of many ranks."""
    one = read_trace(name)
    judged = replay(one.moments, Plan(all_rules()))
    return {
        "trace": name, "ranks": len(one.workers), "stages": len(set(one.stages)), "steps": one.steps, "slow": one.slow,
        "rules": list(one.rules),
        "alerts": [dataclasses.asdict(alert) for alert in judged.alerts],
    }  # fmt: skip


def gpu_job(name: str) -> dict[str, Any]:
    """All rules on a job that was recorded on a GPU."""
    judged = replay(gpu_jobs.moments_of(name), Plan(all_rules()))
    return {
        "job": name, "steps": judged.steps, "rules": list(gpu_jobs.TRUTH[name]),
        "alerts": [dataclasses.asdict(alert) for alert in judged.alerts],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
