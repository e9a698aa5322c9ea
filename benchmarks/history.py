"""How fast old runs are read: one run of 20 series in each format that benchmarks/history_files.py writes.

    PYTHONPATH=benchmarks:tests python benchmarks/history.py [--quick] [--write]

Each file is read three times, each time in a fresh process; the time is that from before the import of the readers until
the run is there, and the file is in the page cache. All steps, times and values are compared with those that were written.
Exits with 1 where a reader takes more than 10 s for a million points: of processor time, since a reader has one thread and
waits for nothing, so that more wall time is other programs'. --write puts the table into docs/evidence/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tables
from history_files import FORMATS, NAMES, Format, Training

from perfagent_client.history import OldRun

POINTS, QUICK_POINTS, TIMES = 1_000_000, 100_000, 3
MOST_S = 10.0
"""For a million points."""

READ = """
import sys, time
begun, used = time.perf_counter(), time.process_time()
from pathlib import Path
from perfagent_client.history import find_runs
[run] = [run for source in find_runs([Path(sys.argv[1])]) for run in source.read()]
wall, cpu = time.perf_counter() - begun, time.process_time() - used
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
import json
from history import compare
compare(run, int(sys.argv[2]), sys.argv[3] == "timed")
print(json.dumps({"wall": wall, "cpu": cpu, "peak": int(peak.split()[1]) / 1024}))
"""


def compare(run: OldRun, steps: int, is_timed: bool) -> None:
    """Raises ValueError where the run is not the one that was written."""
    wanted = Training.of(steps)
    if run.left_out or set(run.series) != set(NAMES):
        raise ValueError(f"left out: {run.left_out}; series: {[*run.series]}")
    times = wanted.times if is_timed else np.full(steps, np.nan)
    for name, values in zip(NAMES, wanted.values.T, strict=True):
        read = run.series[name]
        same = [
            np.array_equal(read.step, wanted.steps),
            np.array_equal(read.time, times, True),
            np.array_equal(read.value, values),
        ]
        if not all(same):
            raise ValueError(f"{name}: steps, times and values are as written: {same}")


def measured(kind: Format, training: Training) -> dict[str, float]:
    """Medians of seconds and of MiB, and the size of the files in MB."""
    steps = len(training.steps)
    with tempfile.TemporaryDirectory(prefix="perfagent-history-") as place:
        folder = Path(place) / "run"
        folder.mkdir()
        kind.write(folder, training)
        job = [sys.executable, "-c", READ, str(folder), str(steps), "timed" if kind.is_timed else ""]
        found: list[dict[str, Any]] = []
        for _ in range(TIMES):
            done = subprocess.run(job, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{kind.name}: {done.stderr}")
            found.append(json.loads(done.stdout))
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {"size": size / 1e6} | {name: statistics.median(one[name] for one in found) for name in found[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    points = QUICK_POINTS if options.quick else POINTS
    training = Training.of(points // len(NAMES))
    rows, slow = [], []
    for kind in FORMATS:
        found = measured(kind, training)
        rows.append([kind.name, *(tables.figure(found[name]) for name in ("size", "wall", "cpu", "peak"))])
        print(*rows[-1], flush=True)
        slow += [kind.name] if found["cpu"] * 1e6 / points > MOST_S else []
    table = tables.table(["format", "MB", "wall s", "CPU s", "peak MiB"], rows)
    text = (
        f"{tables.machine('numpy', 'pyarrow')}. {points:,} points: {len(NAMES)} series of {len(training.steps):,} steps; medians "
        f"of {TIMES}.\n\n{table}"
    )
    print(text)
    if options.write:
        tables.replace("history", text)
    if slow:
        print(f"more than {MOST_S:.0f} s of processor time for a million points: {', '.join(slow)}", file=sys.stderr)
    return int(bool(slow) and not options.quick)  # to start takes the larger part of a tenth


if __name__ == "__main__":
    sys.exit(main())
