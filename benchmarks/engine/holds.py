"""How long the rules engine keeps others waiting: its own lock, and the writer during a checkpoint.

    PYTHONPATH=benchmarks python benchmarks/engine/holds.py [--quick] [--write]

Lost runs: many runs ended by falling silent; then one more falls silent. While the engine looks at that, routes that ask
for a verdict wait for its lock. Checkpoint: many live runs with full windows have moved. While the writer writes their
snapshots, agents wait for their acknowledgements. Each figure is the longest single hold, in wall time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tables

from perfagent.wire import Event, Frame, Group
from perfagent_server.database import Database, open_database
from perfagent_server.engine.scheduler import Engine
from perfagent_server.settings import Settings
from perfagent_server.store.sql import SqlStore

START = 1_700_000_000.0
_WINDOW = 1200  # steps: the longest that a rule keeps
_NAMES = ("loss", "lr", "grad/norm", "step_time_s", "phase/data_s", "phase/forward_s", "phase/backward_s")


class Clock:
    def __init__(self) -> None:
        self.at = START

    def __call__(self) -> float:
        return self.at


class TimedLock:
    """A lock that may be taken again by its thread, and knows how long it was held at most."""

    def __init__(self) -> None:
        self._lock, self._depth, self._since = threading.RLock(), 0, 0.0
        self.longest_s = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._since = time.perf_counter()

    def __exit__(self, *_error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.longest_s = max(self.longest_s, time.perf_counter() - self._since)
        self._lock.release()


@contextmanager
def timed_jobs(database: Database) -> Iterator[list[float]]:
    """Seconds of each job that the writer did meanwhile."""
    submit, seconds = database.submit, []

    def timed(job: Callable[[Any], Any], **options: Any) -> Any:
        def run(connection: Any) -> Any:
            begin = time.perf_counter()
            try:
                return job(connection)
            finally:
                seconds.append(time.perf_counter() - begin)

        return submit(run, **options)

    database.submit = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        database.submit = submit  # type: ignore[method-assign]


def frame(run: int, seq: int, steps: range) -> Frame:
    times = [START + step for step in steps]
    values = {name: [2.0 + 0.001 * (step % 7) for step in steps] for name in _NAMES}
    events = [Event(kind="state", time=START, data={"state": "running", "world_size": 1})] if seq == 1 else []
    return Frame(
        project="bench", run=f"run{run}", source=f"run{run}", attempt=1, rank=0, seq=seq,
        groups=[Group(list(steps), times, times, values)], events=events,
    )  # fmt: skip


def store_and_judge(database: Database, store: SqlStore, engine: Engine, frames: list[Frame], now: float) -> None:
    for begin in range(0, len(frames), 256):
        part = frames[begin : begin + 256]
        database.write(lambda connection, part=part: store.append_in(connection, part, now))  # type: ignore[misc]
    while engine.run_once():
        pass


def after_one_falls_silent(lost: int) -> float:
    """The longest hold of the engine's lock in seconds, with so many runs lost before."""
    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="perfagent-bench-") as folder:
        database = open_database(Settings(data=Path(folder)))
        store = SqlStore(database)
        engine = Engine(database, store, clock=clock, monotonic=clock)
        lock = engine._lock = TimedLock()  # type: ignore[assignment]
        try:
            store_and_judge(database, store, engine, [frame(run, 1, range(1, 3)) for run in range(lost)], clock.at)
            clock.at += 3600
            engine.look_for_silence()
            engine.checkpoint()
            engine.forget()
            store_and_judge(database, store, engine, [frame(lost, 1, range(1, 3))], clock.at)
            clock.at += 3600
            lock.longest_s = 0.0
            engine.look_for_silence()
            return lock.longest_s
        finally:
            database.close()


def of_a_checkpoint(runs: int) -> float:
    """The longest job of the writer in seconds, while so many runs with full windows are written."""
    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="perfagent-bench-") as folder:
        database = open_database(Settings(data=Path(folder)))
        store = SqlStore(database)
        engine = Engine(database, store, clock=clock, monotonic=clock, checkpoint_s=1e9)
        try:
            frames = [frame(run, 1, range(1, _WINDOW + 1)) for run in range(runs)]
            store_and_judge(database, store, engine, frames, clock.at)
            with timed_jobs(database) as seconds:
                engine.checkpoint()
            return max(seconds)
        finally:
            database.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the runs: to see that it works, not to quote")
    parser.add_argument("--write", action="store_true", help="put the table into docs/evidence/benchmarks.md")
    arguments = parser.parse_args()
    lost, live = (1000, 100) if arguments.quick else (10_000, 1000)
    rows = [
        [
            f"the engine's lock: {lost:,} runs were lost, one more falls silent",
            f"{1e3 * after_one_falls_silent(lost):.1f}",
        ],
        [f"the writer: checkpoint of {live:,} live runs", f"{1e3 * of_a_checkpoint(live):.1f}"],
    ]
    table = tables.machine() + "\n\n" + tables.table(["what is held", "longest hold, ms"], rows)
    print(table)
    if arguments.write:
        tables.replace("holds", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
