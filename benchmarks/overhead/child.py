"""One tracker in one fresh process: trains, logs 10 scalars in every step, prints one line `RESULT {json}`.

Clocks: `thread_time` is the CPU of the training thread alone; `process_time` that of all threads; child processes are
read from the system. All three hold on a busy machine, wall time does not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import psutil
import torch  # noqa: F401 - before the tracker: a training job has it already
from adapters import TRACKERS, Adapter
from workloads import make

SETTLE_S = 2.0  # so long after its start a tracker's own threads and processes have come up


def children_cpu_s(process: psutil.Process) -> float:
    """CPU of live descendants and of those that have been waited for."""
    total = sum(process.cpu_times()[2:4])
    for child in process.children(recursive=True):
        try:
            total += sum(child.cpu_times()[:4])
        except psutil.Error:
            continue
    return float(total)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tracker", required=True, choices=TRACKERS)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--workload", default="mlp")
    options = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="perfagent-bench-"))
    os.chdir(folder)
    me = psutil.Process()
    adapter: Adapter = TRACKERS[options.tracker].adapter()
    workload = make(options.workload)
    for _ in range(10):
        workload.step()
    rss, threads = me.memory_info().rss, me.num_threads()

    # --- what it costs to begin: until the calls return, and what its threads and processes do just after
    thread_0, process_0, children_0, wall_0 = (
        time.thread_time(),
        time.process_time(),
        children_cpu_s(me),
        time.perf_counter(),
    )
    adapter.load()
    adapter.start(folder, workload)
    setup_thread_s, setup_wall_s = time.thread_time() - thread_0, time.perf_counter() - wall_0
    time.sleep(SETTLE_S)
    setup_process_s = time.process_time() - process_0 + children_cpu_s(me) - children_0

    # --- what it costs to run
    names = [f"train/m{i}" for i in range(9)]
    calls_wall: list[float] = []
    calls_cpu: list[float] = []
    train_cpu_s = 0.0
    thread_0, process_0, children_0, wall_0 = (
        time.thread_time(),
        time.process_time(),
        children_cpu_s(me),
        time.perf_counter(),
    )
    for step in range(options.steps):
        begin = time.thread_time()
        loss = float(workload.step().detach())
        train_cpu_s += time.thread_time() - begin
        metrics = {name: loss * 0.5 + i for i, name in enumerate(names)}
        metrics["my_loss"] = loss
        cpu, wall = time.thread_time(), time.perf_counter()
        adapter.log(step, metrics)
        calls_wall.append(time.perf_counter() - wall)
        calls_cpu.append(time.thread_time() - cpu)
    loop_s = time.perf_counter() - wall_0
    thread_s, process_s = time.thread_time() - thread_0, time.process_time() - process_0
    background_s = process_s - thread_s + children_cpu_s(me) - children_0
    children = me.children(recursive=True)
    grown_threads, grown_rss = me.num_threads() - threads, me.memory_info().rss - rss
    children_rss = sum(child.memory_info().rss for child in children)

    wall_0 = time.perf_counter()
    adapter.finish()
    finish_s = time.perf_counter() - wall_0

    step_us = train_cpu_s / options.steps * 1e6
    result = {
        "step_us": step_us,
        "log_us": statistics.median(calls_cpu) * 1e6,
        "log_p99_us": percentile(calls_cpu, 0.99) * 1e6,
        "log_wall_us": statistics.median(calls_wall) * 1e6,
        "background_us": background_s / options.steps * 1e6,
        "background_cpu_pct": 100 * background_s / loop_s,
        "log_mean_us": statistics.fmean(calls_cpu) * 1e6,
        "setup_thread_s": setup_thread_s,
        "setup_process_s": setup_process_s,
        "setup_wall_s": setup_wall_s,
        "finish_s": finish_s,
        "rss_mib": grown_rss / 2**20,
        "children_rss_mib": children_rss / 2**20,
        "threads": grown_threads,
        "processes": len(children),
    }
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)  # what a tracker leaves for the interpreter's end is not measured here


if __name__ == "__main__":
    main()
