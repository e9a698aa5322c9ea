"""How long a backup and its restore take, of SQLite and of PostgreSQL: seconds, with the same data in both.

    PYTHONPATH=benchmarks:tests python benchmarks/store/backup.py [--quick] [--write]

PostgreSQL is a real server on the same machine, without fsync as in the tests: a slower disk makes its restore slower.
--write puts the table into docs/server/operations.md.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import postgresql_server
import tables
from frames import BEGIN, frame, rows

from perfagent_server.database import open_database
from perfagent_server.settings import Settings
from perfagent_server.store.backup import back_up, restore
from perfagent_server.store.sql import SqlStore
from perfagent_server.store.write.compaction import Compactor

PAGE = Path(__file__).resolve().parents[2] / "docs" / "server" / "operations.md"
NAMES, STEPS = 20, 20_000


def fill(settings: Settings, runs: int) -> None:
    """Runs of 400,000 random samples each: what cannot be compressed."""
    with contextlib.closing(open_database(settings)) as database:
        store, compactor = SqlStore(database), Compactor(database, rules_enabled=False)
        for run in range(runs):
            noise = np.random.default_rng(run).standard_normal((NAMES, STEPS))
            made = frame(1, rows({f"m{at}": noise[at] for at in range(NAMES)}, range(STEPS)), run=f"r{run}")
            database.write(lambda connection, made=made: store.append_in(connection, [made], BEGIN))  # type: ignore[misc]
            compactor.run_once(everything=True)


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(folder: Path, runs: int) -> str:
    sources = {
        "SQLite": Settings(data=folder / "sqlite"),
        "PostgreSQL": Settings(data=folder / "pg", database=postgresql_server.empty_database("bench_backup")),
    }
    targets = {
        "SQLite": Settings(data=folder / "restored"),
        "PostgreSQL": Settings(data=folder / "pg2", database=postgresql_server.empty_database("bench_restored")),
    }
    lines = []
    for name, settings in sources.items():
        fill(settings, runs)
        file = folder / f"{name}.db"
        saving = timed(lambda settings=settings, file=file: back_up(settings, file, ()))  # type: ignore[misc]
        restoring = timed(lambda name=name, file=file: restore(targets[name], file, replace=False))  # type: ignore[misc]
        size = file.stat().st_size / 1e6
        lines.append([name, f"{size:.0f} MB", f"{saving:.1f} s", f"{restoring:.1f} s", f"{size / saving:.0f} MB/s"])
    head = ["database", "backup file", "backup", "restore", "backup, a second"]
    return f"{tables.machine()}.\n\n{tables.table(head, lines)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="little data: to see that it works, not to quote")
    parser.add_argument("--write", action="store_true", help="put the table into docs/server/operations.md")
    arguments = parser.parse_args()
    stop = postgresql_server.start()
    try:
        with tempfile.TemporaryDirectory(prefix="perfagent-bench-backup-") as folder:
            found = measure(Path(folder), 4 if arguments.quick else 40)
    finally:
        stop()
    print(found)
    if arguments.write:
        tables.replace("backup", found, PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
