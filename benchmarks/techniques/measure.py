"""Runs every `perfagent bench NAME` in a process of its own and writes docs/evidence/techniques.md from what was measured.

    PYTHONPATH=benchmarks python benchmarks/techniques/measure.py [--quick] [--device cpu|cuda] [--only NAME ...] [--write]
    PYTHONPATH=benchmarks python benchmarks/techniques/measure.py --render      only the page, from figures measured before

The figures of the last run on each kind of device are kept beside this file (cpu.json, cuda.json), so that a run on a
GPU fills its column and leaves the other. Quick runs are not written. Fails when what perfagent promises is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import tables

from perfagent_tools.bench.command import BENCHMARKS

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "evidence" / "techniques.md"
LEAST = {"packing.fill": 99.0, "workers.speed": 4.0, "async-checkpoint.blocked": 3.0}
"""What perfagent promises: the script fails below it."""
MOST_PACK_S = 1.0
KINDS = {"cpu": "CPU", "cuda": "GPU"}
SHOWN = ("machine", "date", "setup", "figures")
NONE: dict[str, Any] = {"figures": {}}


def run(name: str, device: str | None, *, quick: bool) -> dict[str, Any]:
    """The report of one benchmark. Ends with its error if it fails."""
    command = [sys.executable, "-m", "perfagent", "bench", name, "--json", *(["--quick"] if quick else [])]
    done = subprocess.run(
        [*command, *(["--device", device] if device else [])],
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return dict(json.loads(done.stdout)) | {"date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"}


def broken(report: dict[str, Any]) -> list[str]:
    """Promises that this report does not hold, in words."""
    values = {f"{report['name']}.{name}": figure["value"] for name, figure in report["figures"].items()}
    found = [
        f"{identity} is {values[identity]:.2f}, below {least:g}"
        for identity, least in LEAST.items()
        if values.get(identity) is not None and values[identity] < least
    ]
    pack_s = report["beside"].get("pack_s", 0.0)
    return found + ([f"packing takes {pack_s:.2f} s, more than {MOST_PACK_S:g}"] if pack_s > MOST_PACK_S else [])


def kept(kind: str) -> dict[str, dict[str, Any]]:
    """Benchmark -> the report of the last run on that kind of device; empty before the first."""
    path = HERE / f"{kind}.json"
    return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}


def keep(kind: str, reports: dict[str, dict[str, Any]]) -> None:
    shown = {name: {key: report[key] for key in SHOWN} for name, report in reports.items()}
    (HERE / f"{kind}.json").write_text(json.dumps(shown, indent=1) + "\n", "utf-8")


def page(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """found: kind of device -> benchmark -> report."""
    parts = [_machines(found)]
    for name, (_, what) in BENCHMARKS.items():
        setups = [_setup(KINDS[kind], reports[name]) for kind, reports in found.items() if name in reports]
        names = dict.fromkeys(each for reports in found.values() for each in reports.get(name, NONE)["figures"])
        rows = [
            [each, *(_cell(found[kind].get(name), each) for kind in KINDS), _condition(found, name, each)]
            for each in names
        ]
        parts += [f"## `perfagent bench {name}`", f"{what[0].upper()}{what[1:]}. {' '.join(setups)}".rstrip()]
        parts += [tables.table(["gain", "CPU", "GPU", "when it helps"], rows)]
    return "\n\n".join(parts)


def _setup(title: str, report: dict[str, Any]) -> str:
    return f"{title} ({report['machine']}; {report['date']}): {report['setup']}."


def _machines(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = []
    for kind, title in KINDS.items():
        machines = sorted({report["machine"] for report in found[kind].values()})
        lines.append(f"- {title}: {'; '.join(machines) or 'not run'}")
    return "\n".join(lines)


def _cell(report: dict[str, Any] | None, figure: str) -> str:
    found = (report or NONE)["figures"].get(figure)
    return "not run" if found is None else f"{found['here']}{' (not measured)' if found['value'] is None else ''}"


def _condition(found: dict[str, dict[str, dict[str, Any]]], name: str, figure: str) -> str:
    """As it was last seen on a GPU, else on a CPU."""
    figures = {**found["cpu"].get(name, NONE)["figures"], **found["cuda"].get(name, NONE)["figures"]}
    return str(figures[figure]["condition"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and short: to see that it works, not to quote")
    parser.add_argument("--device", choices=[*KINDS])
    parser.add_argument("--only", nargs="+", choices=[*BENCHMARKS], metavar="NAME")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args()
    missed: list[str] = []
    for name in () if options.render else options.only or BENCHMARKS:
        print(f"  {name}", file=sys.stderr, flush=True)
        report = run(name, options.device, quick=options.quick)
        print(json.dumps({each: figure["here"] for each, figure in report["figures"].items()}, indent=1))
        missed += [] if options.quick else broken(report)
        if options.write and not options.quick:
            keep(report["device"], kept(report["device"]) | {name: report})
    if options.render or (options.write and not options.quick):
        tables.replace("techniques", page({kind: kept(kind) for kind in KINDS}), PAGE)
    for sentence in missed:
        print(f"missed: {sentence}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
