"""What the training loop costs a step, beside Fabric and Accelerate: interleaved rounds, fresh processes, medians.

    PYTHONPATH=benchmarks python benchmarks/loop/measure.py [--quick] [--write]

Fails when perfagent's loop costs more than MOST_US in any case, or more than one of the others.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

import tables

HERE = Path(__file__).resolve().parent
LIBRARIES = ("perfagent.loop", "Fabric", "Accelerate")
MOST_US = 30.0


def run_child(library: str, rounds: int) -> dict[str, float]:
    command = [sys.executable, str(HERE / "child.py"), "--through", library, "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
    raise SystemExit(f"{library}: exit {done.returncode}: {done.stderr.strip()[-800:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two short rounds: to see that it works, not to quote")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rounds, blocks = (2, 30) if options.quick else (5, 100)
    figures: dict[str, list[dict[str, float]]] = {library: [] for library in LIBRARIES}
    for number in range(rounds):
        order = [*LIBRARIES]
        random.Random(number).shuffle(order)
        for library in order:
            print(f"  round {number + 1} of {rounds}: {library}", file=sys.stderr, flush=True)
            figures[library].append(run_child(library, blocks))

    cases = [name for name in figures["Fabric"][0] if not name.endswith(": by hand")]
    costs = {
        library: {case: statistics.median(one[case] for one in results) for case in cases}
        for library, results in figures.items()
    }
    hand = {
        case: statistics.median(one[f"{case}: by hand"] for results in figures.values() for one in results)
        for case in cases
    }
    rows = [
        [case, tables.figure(hand[case]), *(f"+{costs[library][case]:.1f}" for library in LIBRARIES)] for case in cases
    ]
    text = "\n".join(
        [
            f"{tables.machine('torch', 'lightning', 'accelerate')}. CPU µs of the training thread for a micro-step, data loading "
            f"included; medians over blocks in turn with the same by hand, and over {rounds} "
            "interleaved rounds of fresh processes.",
            "",
            tables.table(["training", "by hand", *(f"{library} adds" for library in LIBRARIES)], rows),
        ]
    )
    print(text)
    if options.write:
        tables.replace("loop", text)
    ours = costs["perfagent.loop"]
    missed = [
        case
        for case in cases
        if ours[case] > MOST_US or ours[case] >= min(costs[other][case] for other in LIBRARIES[1:])
    ]
    for case in missed:
        print(f"missed: {case}: {ours[case]:.1f} µs", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
