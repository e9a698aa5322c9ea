"""How often `perfagent gate` is wrong: pairs without a difference, pairs of which one is 5 % slower, pairs of which one is sick,
and pairs of which one has a layer more, each second pair beside a busy loop.

    PYTHONPATH=benchmarks:tests python benchmarks/gate.py [--quick] [--only same,slower,sick,layers] [--write]

The bar: of 20 pairs without a difference none is found, of 20 slower ones 18 are, of 10 sick ones 9, each within 3 minutes; of 4
pairs as many in proportion. Exits with 1 below it. The pairs with a layer more are reported only: by how much it makes a step
longer is measured here and stands beside them. --write puts the table into docs/evidence/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tables
from gate_job import share_of_a_layer

JOB = Path(__file__).with_name("gate_job.py")
STEPS, SECONDS, MOST_S = 100_000, 120, 180
KINDS = ("forward", "wait", "collate", "optimizer")
FAULTS = (
    "nan", "spike", "divergence", "frozen", "rate-jump", "wrong-optimizer", "dead-units", "data-bug", "data-repeats", "exception",
)  # fmt: skip
PAIRS = {"same": 20, "slower": 20, "sick": 10, "layers": 4}
_QUICK = 4
LEAST_RIGHT = {"same": 1.0, "slower": 0.9, "sick": 0.9}
_LAYER_STEPS = 1000


@dataclass(frozen=True)
class Pair:
    """group: same, slower, sick or layers; what: the slower kind or the fault; base, new: commands."""

    group: str
    what: str
    busy: bool
    base: str
    new: str
    seconds: int


def pairs_of(group: str, count: int) -> list[Pair]:
    made = []
    for number in range(count):
        busy, job = number % 2 == 1, f"python {JOB} {STEPS}"
        if group == "sick":
            what = FAULTS[number % len(FAULTS)]
            demo = "python -m perfagent_tools.demo.job --steps 400 --fault"
            made.append(Pair(group, what, busy, f"{demo} none", f"{demo} {what}", 150))
        elif group == "slower":
            what = KINDS[number // 2 % len(KINDS)]
            made.append(Pair(group, what, busy, job, f"{job} {what} 5", SECONDS))
        elif group == "layers":
            made.append(Pair(group, "", busy, job, f"{job} layers", SECONDS))
        else:
            made.append(Pair(group, "", busy, job, job, SECONDS))
    return made


def _spin() -> None:
    while True:
        pass


@contextlib.contextmanager
def busy_loop(busy: bool) -> Iterator[None]:
    process = multiprocessing.Process(target=_spin, daemon=True) if busy else None
    if process is not None:
        process.start()
    try:
        yield
    finally:
        if process is not None:
            process.kill()


def measured(pair: Pair) -> dict[str, Any]:
    words = ["--base-command", pair.base, "--new-command", pair.new, "--seconds", str(pair.seconds), "--json"]
    began = time.monotonic()
    with busy_loop(pair.busy), tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", "from perfagent_server.commands.gate import command; import argparse, sys;"
             "p = argparse.ArgumentParser(); command(p); a = p.parse_args(); sys.exit(a.run(a))", *words],
            capture_output=True, text=True, cwd=folder,
        )  # fmt: skip
    took_s = time.monotonic() - began
    if not done.stdout:
        raise SystemExit(f"{pair}: {done.stderr}")
    found = json.loads(done.stdout)
    right = done.returncode == 1 and (
        found["speed"] == "slower" if pair.group in ("slower", "layers") else bool(found["sicker"] or found["broken"])
    )
    if pair.group == "same":
        right = done.returncode != 1
    line = {
        "group": pair.group, "what": pair.what, "busy": pair.busy, "exit": done.returncode, "right": right and took_s < MOST_S,
        "took_s": round(took_s, 1), "by": found["by"], "phase": found["phase"], "times": found["times"], "steps": found["steps"],
        "sicker": [one["rule"] for one in found["sicker"]], "slow_rules": [one["rule"] for one in found["slow_rules"]],
        "broken": found["broken"],
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    return line


def rows(lines: list[dict[str, Any]]) -> list[list[str]]:
    made, names = [], {}
    if any(line["group"] == "layers" for line in lines):
        names["layers"] = f"layers ({100 * share_of_a_layer(_LAYER_STEPS):+.1f} %)"
    for group in PAIRS:
        for busy in (False, True):
            its = [line for line in lines if (line["group"], line["busy"]) == (group, busy)]
            if its:
                codes = ", ".join(f"{sum(line['exit'] == code for line in its)} exit {code}" for code in (0, 1, 3))
                longest = max(line["took_s"] for line in its)
                right = f"{sum(line['right'] for line in its)} of {len(its)}"
                made.append(
                    [names.get(group, group), "busy loop" if busy else "quiet", right, codes, f"{longest:.0f} s"]
                )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 pairs of each group, instead of 20, 20, 10 and 4")
    parser.add_argument("--only", default=",".join(PAIRS))
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    lines = [
        measured(pair)
        for group in arguments.only.split(",")
        for pair in pairs_of(group, _QUICK if arguments.quick else PAIRS[group])
    ]
    head = ["pairs", "machine", "right", "exit codes", "longest"]
    text = f"{tables.machine()}\n\n{tables.table(head, rows(lines))}"
    print(text)
    if arguments.write:
        tables.replace("gate", text)
    shares = {group: [line["right"] for line in lines if line["group"] == group] for group in LEAST_RIGHT}
    return int(any(its and sum(its) < LEAST_RIGHT[group] * len(its) for group, its in shares.items()))


if __name__ == "__main__":
    sys.exit(main())
