"""Runs the rows, prints `survived/total` for each and writes the table of docs/evidence/faults.md. Started by scripts/faults.

What each loop came to is kept in benchmarks/results/faults.json with its date, so that one loop can be run again without
the others: the page is always made of the newest result of each.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import logging
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as Xml
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nan_latency
import tables
from faults import agent_rows, alert_rows, demo_faults, resume_rows, rows
from faults.outcome import Outcome

ROOT = Path(__file__).resolve().parents[2]
FAULTS = {
    "A01": "no server at the start",
    "A02": "the server stands still",
    "A03": "the server is slow",
    "A04": "connections are cut, answers lost, requests repeated and reordered",
    "A05": "no server for 24 hours",
    "A06": "429 and 503 with Retry-After",
    "A07": "413",
    "A08": "400 and 422",
    "A09": "401 and 403",
    "A10": "something answers that is no perfagent server",
    "A11": "the trainer is killed with SIGKILL",
    "A12": "the kernel's out-of-memory killer",
    "A13": "every other way to end",
    "A14": "forks, workers, spawned ranks",
    "A15": "the disk is full, broken or read-only",
    "A16": "the spool is damaged",
    "A17": "several processes, one spool",
    "A18": "the clock jumps",
    "A19": "values of every kind",
    "A20": "names of every kind, and too many",
    "A21": "trouble of the agent's own",
    "A22": "no driver, one that hangs, a lost GPU",
    "A23": "hooks and callbacks that raise",
    "A24": "names, proxies, IPv6",
    "S01": "the server is killed with SIGKILL",
    "S02": "the server's disk is full",
    "S03": "the database is damaged, read-only or of another version",
    "S04": "the database is locked, or its connections are cut",
    "S05": "more agents than the server can take",
    "S06": "one noisy run",
    "S07": "pages that read slowly, or vanish",
    "S08": "the server is stopped while it takes frames or migrates",
    "S09": "agents, servers and databases of different versions",
    "S10": "the server's clock jumps",
    "S11": "a backup while the server writes, and its restore",
    "X01": "requests of every kind to every route",
    "X02": "bombs, bodies without an end, broken HTTP",
    "X03": "names that are paths",
    "X04": "data that would run code",
    "X05": "receivers at inner addresses",
    "X06": "texts of others in pages and exports",
    "X07": "pages of other sites, and names that lead here",
    "X08": "guesses at keys and passwords, and keys in logs",
    "X09": "every route, with every key and role",
    "X10": "secrets of a careless job",
    "X11": "who may read the spool",
    "W01": "the receiver of webhooks fails",
    "W02": "the server dies with an alert on the way",
    "W03": "NaN on the way to the receiver",
    "W04": "the receiver is away for days",
    "W05": "the server falls silent, or an agent does",
    "T01": "a training is killed with SIGKILL, and resumed",
    "D01": "a training is sick, in each way that the demo knows",
}
"""The rows of the table; what each must do is said by its tests."""
KEPT = ROOT / "benchmarks" / "results" / "faults.json"
TESTED = (
    "tests/agent",
    "tests/faults",
    "tests/server/alerts",
    "tests/training/checkpoint/test_folder.py",
)
SERVER_TESTED = (
    "tests/agent/bench/test_ingest.py",
    "tests/dashboard/test_run_page.py",
    "tests/faults/test_backup.py",
    "tests/faults/test_server.py",
    "tests/promises/test_repository.py",
    "tests/server/alerts/test_outbound.py",
    "tests/server/api",
    "tests/server/engine/test_scheduler.py",
    "tests/server/ingest",
    "tests/server/live",
    "tests/server/security",
    "tests/server/store/test_database.py",
    "tests/server/store/test_retention_by_project.py",
)
"""Tests of the rows about running a server and about who may do what, a loop of their own: `scripts/faults server`."""

Loop = Callable[[Path, bool], list[Outcome]]


def _nan(folder: Path, *, quick: bool) -> list[Outcome]:
    runs = 3 if quick else 50
    latencies = nan_latency.measure(runs, folder)
    within = sum(value <= nan_latency.LIMIT_S for value in latencies)
    required = runs - runs // 50
    figures = f"slowest {max(latencies):.2f} s; {required} are required"
    return [
        Outcome(
            "W03", "NaN loss at a healthy receiver within 2 s, each a run of its own", within, runs, figures, required
        )
    ]


def _one_fault(name: str) -> Loop:
    return lambda folder, quick: demo_faults.demo_faults(folder, (name,), quick=quick)


LOOPS: dict[str, Loop] = {
    "trainings": lambda folder, _: agent_rows.whole_trainings(folder),
    "stop": lambda folder, quick: rows.server_stopped(folder, seconds=5.0 if quick else 60.0),
    "slow": lambda _, __: [agent_rows.slow_answers()],
    "cuts": lambda folder, quick: [agent_rows.cut_connections(folder, cuts=50 if quick else 1000)],
    "outage": lambda folder, quick: agent_rows.long_outages(folder, hours=0.5 if quick else agent_rows.DAY_H),
    "agent-kill": lambda folder, quick: agent_rows.killed_agents(folder, kills=6 if quick else 200),
    "forks": lambda folder, quick: agent_rows.forks(folder, count=20 if quick else 1000),
    "damage": lambda folder, quick: [agent_rows.damaged_spools(folder, rounds=100 if quick else 5000)],
    "starts": lambda folder, quick: [agent_rows.starts_at_once(folder, rounds=1 if quick else 20)],
    "kill": lambda folder, quick: [rows.server_killed_under_load(folder, kills=5 if quick else 50)],
    "gap": lambda folder, quick: [alert_rows.killed_between_ack_and_judgment(folder, trials=2 if quick else 20)],
    "receiver": lambda folder, quick: [
        alert_rows.receiver_fails_and_server_dies(folder, alerts=6 if quick else 30, kills=2 if quick else 6)
    ],
    "points": lambda folder, quick: [alert_rows.killed_at_four_points(folder, kills=1 if quick else 50)],
    "nan": lambda folder, quick: _nan(folder, quick=quick),
    "wide": lambda folder, quick: [alert_rows.many_ranks_at_once(folder, ranks=64 if quick else 512)],
    "flap": lambda folder, quick: alert_rows.flapping_and_restarts(
        folder, seconds=10.0 if quick else 300.0, restarts=1 if quick else 10
    ),
    "away": lambda folder, quick: [alert_rows.receiver_away(folder, alerts=20 if quick else 500)],
    "heartbeat": lambda folder, quick: [alert_rows.heartbeat_of_the_server(folder, beats=2 if quick else 6)],
    "silence": lambda folder, _: [alert_rows.silent_agent(folder)],
    "resume": lambda folder, quick: [
        resume_rows.killed_and_resumed(folder, kind, trials=1 if quick else trials)
        for kind, trials in resume_rows.TRIALS.items()
    ],
    "server": lambda folder, _: tests(folder, SERVER_TESTED),
    "demo": lambda folder, quick: demo_faults.demo_faults(folder, quick=quick),
}
ONE_FAULT = {f"demo:{name}": _one_fault(name) for name in demo_faults.FAULTS}
"""Parts of the loop `demo`, which keep what the others came to."""


def tests(folder: Path, tested: Sequence[str]) -> list[Outcome]:
    """The tests of every row: how many passed of how many ran. A skipped one is named, and counts as neither."""
    report = folder / "report.xml"
    others = [] if tested is SERVER_TESTED else [f"--ignore={path}" for path in SERVER_TESTED]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "fault", "-n", "2", f"--junitxml={report}", *others, *tested]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    passed: dict[str, int] = {}
    ran: dict[str, int] = {}
    words: dict[str, list[str]] = {}
    for case in Xml.parse(report).getroot().iter("testcase"):
        match = re.match(r"test_([aswdxt]\d\d)_", case.get("name", ""))
        if match is None or (row := match[1].upper()) not in FAULTS:
            continue
        skipped, failed = case.find("skipped"), [*case.iter("failure"), *case.iter("error")]
        if skipped is not None:
            words.setdefault(row, []).append(f"skipped: {skipped.get('message')}")
            continue
        ran[row] = ran.get(row, 0) + 1
        passed[row] = passed.get(row, 0) + (not failed)
        if failed:
            words.setdefault(row, []).append(f"failed: {case.get('name')}")
    return [
        Outcome(row, "tests of this row", passed[row], ran[row], "; ".join(dict.fromkeys(words.get(row, []))))
        for row in sorted(ran)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few kills and seconds instead of many; nothing is kept")
    parser.add_argument(
        "loops", nargs="*", help=f"any of tests, {', '.join(LOOPS)}, demo:FAULT for one fault; all without a name"
    )
    options = parser.parse_args()
    logging.getLogger("perfagent").setLevel(logging.CRITICAL)  # of the agents in this process
    if unknown := set(options.loops) - set(LOOPS) - set(ONE_FAULT) - {"tests"}:
        parser.error(f"unknown {sorted(unknown)}; these are: tests, {', '.join([*LOOPS, *ONE_FAULT])}")
    kept: dict[str, Any] = json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else {}
    outcomes: list[Outcome] = []
    for name in options.loops or ("tests", *LOOPS):
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"perfagent-faults-{name}-") as folder:
            try:
                found = (
                    tests(Path(folder), TESTED)
                    if name == "tests"
                    else (LOOPS | ONE_FAULT)[name](Path(folder), options.quick)
                )
            except Exception as error:
                found = [
                    Outcome("?", f"{name} did not come to its end", 0, 1, f"{type(error).__name__}: {error}"[:500])
                ]
        outcomes += found
        kept[name.partition(":")[0]] = {
            "machine": tables.machine("torch"),
            "day": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
            "lines": list(map(dataclasses.asdict, found)),
        }
        for outcome in found:
            print(f"{outcome.survived}/{outcome.total}  {outcome.row}  {outcome.name} ({outcome.figures})", flush=True)
        print(f"  {name}: {time.monotonic() - begin:.0f} s", flush=True)
    good = sum(outcome.good for outcome in outcomes)
    ids = {outcome.row for outcome in outcomes}
    whole = sum(all(outcome.good for outcome in outcomes if outcome.row == row) for row in ids)
    print(f"{whole}/{len(ids)} rows survived, {good}/{len(outcomes)} of their lines")
    if not options.quick:
        KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", "utf-8")
        write(kept)
    return 0 if good == len(outcomes) else 1


def write(kept: dict[str, Any]) -> None:
    seen = [(result["day"], Outcome(**line)) for result in kept.values() for line in result["lines"]]
    lines = [
        [row, fault, outcome.name, f"{outcome.survived}/{outcome.total}", outcome.figures.replace("|", "/"), day]
        for row, fault in FAULTS.items()
        for day, outcome in seen
        if outcome.row == row
    ]
    by_row = {row: [outcome for _, outcome in seen if outcome.row == row] for row in FAULTS}
    survived = sum(bool(outcomes) and all(outcome.good for outcome in outcomes) for outcomes in by_row.values())
    never = [name for name in ("tests", *LOOPS) if name not in kept]
    machines = dict.fromkeys(result["machine"] for result in kept.values())
    head = f"{'; or '.join(machines)}.\n\n**{survived}/{len(FAULTS)} rows survived.**"
    head += f" Not run yet: {', '.join(never)}." if never else ""
    table = tables.table(
        ["row", "fault", "what was done, and what must hold", "survived/total", "figures", "last run"], lines
    )
    tables.replace("faults", f"{head}\n\n{table}", ROOT / "docs" / "evidence" / "faults.md")


if __name__ == "__main__":
    sys.exit(main())
