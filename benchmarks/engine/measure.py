"""What judging a frame costs the server: CPU of the rules engine, by the number of runs and ranks.

    PYTHONPATH=benchmarks python benchmarks/engine/measure.py [--quick] [--loads 1000x1,125x8] [--write]

A frame is what an agent sends for a step: 63 series, one row. A load is so many runs with so many ranks each; every
rank sends one frame a step, and time passes as if each sent one a second. The frames are stored first, by the store's
own write path; then the engine judges them in rounds, and its CPU time (`thread_time`) is counted with that of its
commits left out, because they run on the writer's thread. All rules judge.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import tables

from perfagent.wire import Event, Frame, Group
from perfagent_server.database import open_database
from perfagent_server.engine.scheduler import Engine
from perfagent_server.ingest_benchmark.agents import HEALTHY, NAMES
from perfagent_server.settings import Settings
from perfagent_server.store.sql import SqlStore

LOADS = ("1000x1", "500x2", "125x8", "1x64", "1x512", "1x4096")
START = 1_700_000_000.0


class Clock:
    def __init__(self) -> None:
        self.at = START

    def __call__(self) -> float:
        return self.at


def frame(draw: random.Random, run: int, rank: int, ranks: int, step: int, at: float | None = None) -> Frame:
    """One step of a healthy rank. at: when, Unix seconds; without it so many seconds after START."""
    values = {name: [HEALTHY.get(name, 2.0) * (1 + 0.005 * draw.random())] for name in NAMES}
    time_ = START + step if at is None else at
    running = Event(kind="state", time=time_, data={"state": "running", "world_size": ranks})
    return Frame(
        project="bench", run=f"run{run}", source=f"run{run}-{rank}", attempt=1, rank=rank, seq=step,
        groups=[Group([step], [time_], [time_], values)], events=[running] if step == 1 else [],
    )  # fmt: skip


def measure(load: str, steps: int) -> float:
    """CPU µs of the engine a frame."""
    runs, ranks = map(int, load.split("x"))
    draw, clock, spent, judged = random.Random(1), Clock(), 0.0, 0
    with tempfile.TemporaryDirectory(prefix="perfagent-bench-") as folder:
        database = open_database(Settings(data=Path(folder)))
        store = SqlStore(database)
        engine = Engine(database, store, clock=clock, monotonic=clock, checkpoint_s=1e9)
        try:
            for step in range(1, steps + 1):
                made = [frame(draw, run, rank, ranks, step) for run in range(runs) for rank in range(ranks)]
                for begin in range(0, len(made), 256):
                    part = made[begin : begin + 256]
                    clock.at = START + step + begin / len(made)
                    database.write(lambda connection, part=part: store.append_in(connection, part, clock.at))  # type: ignore[misc]
                    before = time.thread_time()
                    count = engine.run_once()
                    if step > steps // 4:  # before that, evaluators are made and windows grow
                        spent += time.thread_time() - before
                        judged += count
        finally:
            database.close()
    return 1e6 * spent / judged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps: to see that it works, not to quote")
    parser.add_argument("--loads", default=",".join(LOADS), help="RUNSxRANKS, with commas between")
    parser.add_argument("--write", action="store_true", help="put the table into docs/evidence/benchmarks.md")
    arguments = parser.parse_args()
    loads = arguments.loads.split(",")
    figures: dict[str, float] = {}
    for load in loads:
        runs, ranks = map(int, load.split("x"))
        steps = max(4 if arguments.quick else 30, (6_000 if arguments.quick else 40_000) // (runs * ranks))
        figures[load] = measure(load, min(steps, 200))
        print(f"  {load}: {figures[load]:.0f} µs a frame", file=sys.stderr)
    rows = [
        [runs, ranks, f"{cost:.0f}", f"{cost / figures[loads[0]]:.2f}", f"{cost * int(runs) * int(ranks) / 1e6:.2f}"]
        for load, cost in figures.items()
        for runs, ranks in [load.split("x")]
    ]
    head = ["runs", "ranks of each", "CPU µs per frame", "to the first", "cores at one frame per second and rank"]
    table = tables.machine() + "\n\n" + tables.table(head, rows)
    print(table)
    if arguments.write:
        tables.replace("engine", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
