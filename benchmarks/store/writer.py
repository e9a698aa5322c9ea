"""How long jobs hold the one thread that writes, by kind, while many runs are stored and compacted at the same time.

    PYTHONPATH=benchmarks python benchmarks/store/writer.py [--quick] [--runs 1000] [--seconds 100] [--write]

Each run sends one frame a second: 63 series, one row. The writer stores 250 frames in a job. The compactor and the
ledger's trim run on their own thread, as in the server. Halfway through, the benchmark deletes a run with a long
history; at the end, retention deletes the samples of all runs. Python's garbage collector can run in the middle of a
job; its time has a separate column. Other programs and waiting for the interpreter lengthen the wall time.
--write puts the table into docs/evidence/benchmarks.md.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tables

from perfagent.wire import Event, Frame, Group
from perfagent_server.database import Database, open_database
from perfagent_server.settings import Settings
from perfagent_server.store.interface import Receipt
from perfagent_server.store.retention import Retention, RetentionPolicy
from perfagent_server.store.sql import SqlStore
from perfagent_server.store.write.compaction import CompactionPolicy, Compactor

NAMES = [f"metric/{place}" for place in range(63)]
FRAMES_A_JOB = 250
BULK_RANKS, BULK_STEPS = 8, 40_960  # of the run that is deleted: 20 million samples
PLAIN_WORDS = {
    "append": "store frames",
    "_store": "compaction: write blocks, drop tail rows",
    "_trim_some": "ledger trim",
    "_drop": "deletion of a run: empty it",
    "delete": "deletion of a run: the rest",
    "_thin_blocks": "retention: samples of blocks",
    "thin_bundles": "retention: samples of bundles",
    "_shrink_some": "retention: pages back to the disk",
}


class Watch:
    """Wraps every job that the database is given. spent: kind -> (wall ms, CPU ms, those of the garbage collector) of
    each."""

    def __init__(self, database: Database) -> None:
        self.spent: dict[str, list[tuple[float, float, float]]] = {}
        self._collecting = threading.local()
        gc.callbacks.append(self._note)
        self._submit = database.submit
        database.submit = self.submit  # type: ignore[method-assign]

    def submit(self, job: Callable[[Any], Any], *, essential: bool = False) -> Future[Any]:
        inner = job.func if isinstance(job, partial) else job
        kind = getattr(inner, "__name__", str(inner))

        def timed(connection: Any) -> Any:
            self._collecting.spent = 0.0
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return job(connection)
            finally:
                spent = time.perf_counter() - wall, time.thread_time() - cpu, self._collecting.spent
                self.spent.setdefault(kind, []).append(tuple(1e3 * each for each in spent))  # type: ignore[arg-type]

        return self._submit(timed, essential=essential)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        now = time.thread_time()
        if phase == "start":
            self._collecting.began = now
        else:
            self._collecting.spent = getattr(self._collecting, "spent", 0.0) + now - self._collecting.began


def live_frames(runs: int, second: int, start: float) -> list[Frame]:
    now = start + second
    values = {name: [0.5 * place + second] for place, name in enumerate(NAMES)}
    events = [Event(kind="state", time=now, data={"state": "running"})] if second == 0 else []
    group = Group([second], [now], [now], values)
    return [
        Frame(
            project="bench", run=f"run{run}", source=f"run{run}", attempt=1, rank=0, seq=second + 1,
            groups=[Group(group.step, group.time, group.monotonic, dict(group.values))], events=events,
        )
        for run in range(runs)
    ]  # fmt: skip


def bulk_frame(rank: int, part: int, steps: int, start: float) -> Frame:
    step = np.arange(part * steps, (part + 1) * steps)
    noise = np.random.default_rng(part).standard_normal((len(NAMES), steps)).astype("<f4")
    at = (start + 0.25 * step).tobytes()
    columns = {name: row.tobytes() for name, row in zip(NAMES, noise, strict=True)}
    return Frame(
        project="bench", run="bulk", source=f"bulk{rank}", attempt=1, rank=rank, seq=part + 1,
        groups=[Group(step.tobytes(), at, at, columns)],
    )  # fmt: skip


def delete(store: SqlStore, run: str) -> None:
    store.empty(run)
    store.database.write(partial(store.delete, run=run))


def measure(runs: int, seconds: int, ranks: int) -> tuple[dict[str, list[tuple[float, float, float]]], list[float]]:
    acks: list[float] = []
    with tempfile.TemporaryDirectory(prefix="perfagent-bench-") as folder:
        database = open_database(Settings(data=Path(folder)))
        try:
            store = SqlStore(database)

            def append(frames: list[Frame]) -> Future[list[Receipt]]:
                return database.submit(partial(store.append, frames=frames, now=time.time()))

            start = time.time()
            for rank in range(ranks):
                for part in range(BULK_STEPS // 4096):
                    append([bulk_frame(rank, part, 4096, start)]).result()
            watch = Watch(database)
            deletion = threading.Thread(target=delete, args=(store, "bulk"))
            compactor = Compactor(
                database, rules_enabled=False, policy=CompactionPolicy(age_s=min(30.0, seconds / 4)), clock=time.time
            )
            compactor.start()
            start = time.time()
            for second in range(seconds):
                if (early := start + second - time.time()) > 0:
                    time.sleep(early)
                frames = live_frames(runs, second, start)
                for begin in range(0, len(frames), FRAMES_A_JOB):
                    sent = time.perf_counter()
                    append(frames[begin : begin + FRAMES_A_JOB]).result()
                    acks.append(1e3 * (time.perf_counter() - sent))
                if second == seconds // 2:
                    deletion.start()
            deletion.join()
            compactor.stop()
            compactor.run_once(everything=True)
            later = time.time() + 10 * 86_400
            retention = Retention(
                database, store, RetentionPolicy(samples_days=1.0), clock=lambda: later, uptime=lambda: later
            )
            retention.run_once()
        finally:
            database.close()
    return watch.spent, acks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 runs for 12 s: to see that it works, not to quote")
    parser.add_argument("--runs", type=int)
    parser.add_argument("--seconds", type=int)
    parser.add_argument("--write", action="store_true", help="put the table into docs/evidence/benchmarks.md")
    arguments = parser.parse_args()
    runs = arguments.runs or (100 if arguments.quick else 1000)
    seconds = arguments.seconds or (12 if arguments.quick else 100)
    spent, acks = measure(runs, seconds, 1 if arguments.quick else BULK_RANKS)
    rows = []
    for kind, jobs in sorted(spent.items(), key=lambda item: -max(each[1] - each[2] for each in item[1])):
        wall = sorted(each for each, _, _ in jobs)
        cpu = sorted(whole - collecting for _, whole, collecting in jobs)
        long = sum(each > 50 for each in cpu)
        place = int(0.99 * (len(jobs) - 1))
        whole = max(each for _, each, _ in jobs)
        figures = [statistics.median(cpu), cpu[place], cpu[-1], whole, statistics.median(wall), wall[place], wall[-1]]
        rows.append([PLAIN_WORDS.get(kind, kind), str(len(jobs)), *map(tables.figure, figures), str(long)])
    head = [
        "job",
        "jobs",
        "CPU ms p50",
        "p99",
        "longest",
        "with garbage collector",
        "wall ms p50",
        "p99",
        "longest",
        "over 50 ms of CPU",
    ]
    acks.sort()
    told = [statistics.median(acks), acks[int(0.99 * (len(acks) - 1))], acks[-1]]
    text = (
        f"{tables.machine('sqlalchemy', 'numpy')}. {runs} runs, {seconds} s. Acknowledgement of {FRAMES_A_JOB} frames: "
        f"p50 {told[0]:.0f} ms, p99 {told[1]:.0f} ms, longest {told[2]:.0f} ms.\n\n{tables.table(head, rows)}"
    )
    print(text)
    if arguments.write:
        tables.replace("writer", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
