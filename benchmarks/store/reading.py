"""What charts cost with many samples, compacted: the newest values, a series, and a heat map of 64 ranks.

    PYTHONPATH=benchmarks:tests nice python benchmarks/store/reading.py [--millions 10] [--engines sqlite,clickhouse]

One run of 64 ranks and 10 names, float32 noise, one step a quarter of a second; what is asked comes back in the wire's
shape. A figure is the median wall time of 15 tries. Bytes a sample: of SQLite's pages in use, and of ClickHouse's parts
as they are and once merged.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tables import figure, table

from perfagent.wire import Frame, Group
from perfagent_server.database import open_database
from perfagent_server.store.opening import open_store

RANKS, NAMES, FRAME_STEPS = 64, 10, 1024
START = 1.79e9
QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "latest ms": lambda store: store.latest("run"),
    "series of a rank in 1,000 buckets ms": lambda store: store.series("run", "metric/3", rank=5, points=1000),
    "series of all ranks in 1,000 ms": lambda store: store.series("run", "metric/3", points=1000),
    "64-rank heat map ms": lambda store: store.ranks("run", "metric/3", points=200),
}


def frames(first: int) -> list[Frame]:
    step = np.arange(first, first + FRAME_STEPS)
    made = []
    for rank in range(RANKS):
        noise = np.random.default_rng([rank, first]).standard_normal((NAMES + 1, FRAME_STEPS)).astype("<f4")
        stamp = (START + step * 0.25 + np.round(noise[NAMES].astype("<f8") * 3) / 1000).tobytes()
        columns = {f"metric/{at}": noise[at].tobytes() for at in range(NAMES)}
        group = Group(step.astype("<i8").tobytes(), stamp, stamp, columns)
        seq = first // FRAME_STEPS + 1
        made.append(Frame(project="p", run="run", source=f"s{rank}", attempt=1, rank=rank, seq=seq, groups=[group]))
    return made


def measure(engine: str, millions: int, folder: Path) -> list[str]:
    metrics, server = None, None
    if engine == "clickhouse":
        from clickhouse_server import Engine

        server = Engine(folder / "clickhouse")
        metrics = f"{server.url}/bench"
    database = open_database(SimpleNamespace(data=folder, database=None), reserve_bytes=1 << 12)
    store, compactor, _ = open_store(database, metrics, rules_enabled=False)
    begin, stored = time.perf_counter(), 0
    for first in range(0, millions * 1_000_000 // (RANKS * NAMES), FRAME_STEPS):
        database.write(lambda connection, first=first: store.append_in(connection, frames(first), START))
        compactor.run_once(everything=True)
        stored += RANKS * NAMES * FRAME_STEPS
    seconds = time.perf_counter() - begin
    times = []
    for ask in QUESTIONS.values():
        ask(store)
        tries = []
        for _ in range(15):
            start = time.perf_counter()
            ask(store)
            tries.append((time.perf_counter() - start) * 1e3)
        times.append(figure(statistics.median(tries)))
    with database.read() as connection:
        pages, free = (
            connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("page_count", "freelist_count")
        )
    size = (pages - free) * 4096
    sizes = figure(size / stored)
    if server is not None:
        clickhouse = compactor._clickhouse  # type: ignore[union-attr]
        parts = "SELECT sum(bytes_on_disk) FROM system.parts WHERE active AND database = 'bench'"
        now = int(clickhouse.run(parts))
        for name in ("sample", "cell"):
            clickhouse.run(f"OPTIMIZE TABLE bench.{name} FINAL", long=True)
        sizes = f"{figure((size + now) / stored)} ({figure((size + int(clickhouse.run(parts))) / stored)} merged)"
        server.stop()
    database.close()
    return [engine, f"{stored:,}", f"{stored / seconds:,.0f}", *times, sizes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=10)
    parser.add_argument("--engines", default="sqlite,clickhouse")
    options = parser.parse_args()
    rows = []
    for engine in options.engines.split(","):
        with tempfile.TemporaryDirectory(prefix="perfagent-bench-") as folder:
            rows.append(measure(engine, options.millions, Path(folder)))
    print(table(["engine", "samples", "made and stored a second", *QUESTIONS, "bytes/sample"], rows))


if __name__ == "__main__":
    main()
