"""Runs the rows, prints `survived/total` for each and writes the table of docs/faults.md. Started by scripts/faults."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import nan_latency  # noqa: E402
import tables  # noqa: E402
from faults import rows  # noqa: E402

ROWS = ("kill", "stop", "gap", "receiver", "nan")


def run(name: str, folder: Path, *, quick: bool) -> list[rows.Outcome]:
    if name == "kill":
        return [rows.server_killed_under_load(folder, kills=5 if quick else 50)]
    if name == "stop":
        return rows.server_stopped(folder, seconds=5.0 if quick else 60.0)
    if name == "gap":
        return [rows.killed_between_ack_and_judgement(folder, trials=2 if quick else 20)]
    if name == "receiver":
        return [rows.receiver_fails_and_server_dies(folder, alerts=6 if quick else 30, kills=2 if quick else 6)]
    runs = 3 if quick else 50
    latencies = nan_latency.measure(runs, folder)
    within = sum(value <= nan_latency.LIMIT_S for value in latencies)
    figures = f"slowest {max(latencies):.2f} s; {runs - runs // 50} are required"
    name = "NaN loss at a healthy receiver within 2 s, each a run of its own"
    return [rows.Outcome(name, within, runs, figures, required=runs - runs // 50)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few kills and seconds instead of many; the page is not written")
    parser.add_argument("rows", nargs="*", help=f"any of {', '.join(ROWS)}; all without a name")
    options = parser.parse_args()
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"unknown rows {sorted(unknown)}; these are: {', '.join(ROWS)}")
    outcomes: list[rows.Outcome] = []
    for name in options.rows or ROWS:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"perfagent-faults-{name}-") as folder:
            found = run(name, Path(folder), quick=options.quick)
        outcomes += found
        for outcome in found:
            print(
                f"{outcome.survived}/{outcome.total}  {outcome.name} ({outcome.figures}; {time.monotonic() - begin:.0f} s)",
                flush=True,
            )
    good = sum(outcome.good for outcome in outcomes)
    print(f"{good}/{len(outcomes)} rows survived")
    if not options.quick and not options.rows:
        text = f"{tables.machine('torch')}.\n\n" + tables.table(
            ["fault, and what must hold", "survived/total", "figures"],
            [[outcome.name, f"{outcome.survived}/{outcome.total}", outcome.figures] for outcome in outcomes],
        )
        tables.replace("faults", text, ROOT / "docs" / "faults.md")
    return 0 if good == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
