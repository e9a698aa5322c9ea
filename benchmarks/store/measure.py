"""Our store beside a row-per-point SQLite table, MLflow's store and trackio's, in one interleaved run.

    PYTHONPATH=benchmarks python benchmarks/store/measure.py [--quick] [--batches N] [--engines a,b] [--write]

Every store has a process (peers: an environment) of its own and gets the same batches; they take turns of 16 batches
each, and who begins changes from turn to turn. (With turns of one batch each store finds the caches full of the others'
data every time, which a server with work to do does not; every store, the row table too, gains from turns.) Commits are
waited for, compaction is counted. The peers are slower by two orders of magnitude and get the first batches only.
--write puts the table into docs/evidence/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tables import figure, machine, replace, table
from telemetry import CASES

TURN = 16  # batches: as many as our compactor waits between two looks
HERE = Path(__file__).resolve().parent
PEERS = {"mlflow": ["mlflow==3.17.2"], "trackio": ["trackio==0.43.0", "numpy"]}
TITLES = {
    "rows": "SQLite, one row per point (synchronous=NORMAL)",
    "rows-full": "SQLite, one row per point (synchronous=FULL)",
    "perfagent": "**perfagent** (synchronous=FULL, compaction included)",
    "perfagent-postgresql": "**perfagent** on PostgreSQL 18 (compaction included; CPU without PostgreSQL's own)",
    "perfagent-clickhouse": "**perfagent** with ClickHouse (compaction included; CPU without ClickHouse's own)",
    "mlflow": "MLflow 3.17.2 SqlAlchemyStore",
    "trackio": "trackio 0.43.0 SQLiteStorage",
}


@dataclass
class Child:
    """One store's process and what it has answered."""

    name: str
    process: subprocess.Popen[str]
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.name} ended with {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="80 batches a case instead of 400, two of them for the peers"
    )
    parser.add_argument("--batches", type=int)
    parser.add_argument("--cases", default=",".join(CASES), help="shapes of a batch; see telemetry.py")
    parser.add_argument("--engines", default="rows,rows-full,perfagent,perfagent-postgresql,mlflow,trackio")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "perfagent-bench-store",
        help="where the peers' environments lie",
    )
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    batches = options.batches or (80 if options.quick else 400)
    peer_batches = 2 if options.quick else 4
    pythons = {name: _python(options.folder, name) for name in options.engines.split(",")}
    names = [name for name, python in pythons.items() if python is not None]
    sections: list[str] = []
    ratios: list[float] = []
    for case in options.cases.split(","):
        with tempfile.TemporaryDirectory(prefix="perfagent-bench-") as folder:
            children = [_start(name, case, str(pythons[name]), Path(folder) / name) for name in names]
            rows = _case(children, case, batches, peer_batches)
        head = [
            "store",
            "samples/s",
            "to rows",
            "to rows, by CPU",
            "CPU s per million",
            "ack p50 ms",
            "p99 ms",
            "bytes/sample",
        ]
        head += ["series of 1000 ms", "latest of all ms"]
        text = table(head, rows)
        words = CASES[case].words
        print(f"\n{words}, {batches} batches\n{text}", flush=True)
        if not sections:
            sections.append(f"{words}, {batches} batches (peers: {peer_batches}):\n\n{text}")
        else:
            ratios += [float(row[2]) for row in rows if row[0] == TITLES["perfagent"]]
    if options.write:
        note = (
            f"{machine('sqlalchemy', 'numpy', 'zstandard')}. Every store got the same batches, {TURN} at a turn. samples/s: all "
            'samples by all time, compaction included. "to rows": ratio to the first line over the same batches, by time (which '
            "includes waiting for a disk and two cores that other programs used too) and by CPU. bytes/sample: pages in use. "
            "The peers got the first batches only, so their last two columns are over far fewer samples. "
            f"Made by `PYTHONPATH=benchmarks python benchmarks/store/measure.py --batches {batches} --write`."
        )
        replace("store", "\n\n".join([note, *sections, *_others(ratios)]))


def _others(ratios: list[float]) -> list[str]:
    """The shapes of which no table is shown, in a sentence."""
    if not ratios:
        return []
    return [
        f"In {len(ratios)} other shapes of a frame (1 to 2000 names), perfagent stores {min(ratios):.1f} to {max(ratios):.1f} "
        "times as many samples per second as rows."
    ]


def _case(children: list[Child], case: str, batches: int, peer_batches: int) -> list[list[str]]:
    for turn, start in enumerate(range(0, batches, TURN)):
        first = turn % len(children)
        for child in children[first:] + children[:first]:
            for number in range(start, min(start + TURN, peer_batches if child.name in PEERS else batches)):
                answer = child.ask(batch=number)
                child.seconds.append(answer["seconds"])
                child.cpu.append(answer["cpu"])
        if sys.stderr.isatty():
            print(f"\r  {case}: {start + TURN}/{batches}", end="", file=sys.stderr, flush=True)
    rows = []
    base = children[0]
    for child in children:
        end = child.ask(finish=True)
        points = CASES[case].points * len(child.seconds)
        if end["points"] != points:
            raise SystemExit(f"{child.name} holds {end['points']} samples of {points}")
        total = sum(child.seconds) + end["seconds"]
        same = sum(base.seconds[: len(child.seconds)])
        same_cpu = sum(base.cpu[: len(child.cpu)])
        cpu = sum(child.cpu) + end["cpu"]
        series, latest = (child.ask(query=query)["seconds"] for query in ("series", "latest"))
        quantiles = statistics.quantiles(child.seconds, n=100) if len(child.seconds) > 1 else child.seconds * 99
        rows.append(
            [
                TITLES[child.name],
                f"{points / total:,.0f}",
                figure(same / total) if child is not base else "1",
                figure(same_cpu / cpu) if child is not base else "1",
                figure(cpu / points * 1e6),
                figure(statistics.median(child.seconds) * 1e3),
                figure(quantiles[98] * 1e3),
                figure(end["bytes"] / points),
                figure(series * 1e3),
                figure(latest * 1e3),
            ]
        )
        child.close()
    return rows


def _start(name: str, case: str, python: str, folder: Path) -> Child:
    command = [python, str(HERE / "engine.py"), name, case, str(folder)]
    return Child(name, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))


def _python(folder: Path, name: str) -> Path | None:
    """The interpreter for a store; None, with a line that says why, if a peer cannot be installed here."""
    if name not in PEERS:
        return Path(sys.executable)
    home = folder / name
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        print(f"  environment of {name}: {', '.join(PEERS[name])}", file=sys.stderr, flush=True)
        venv.create(home, with_pip=True, clear=True)
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PEERS[name]]
        if subprocess.run(command, check=False).returncode:
            print(f"  {name} cannot be installed here and is left out", file=sys.stderr)
            return None
        (home / "ready").touch()
    return python


if __name__ == "__main__":
    main()
