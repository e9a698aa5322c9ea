"""Injects hangs and long pauses into trainings of 2 to 4 processes under `perfagent run`: how soon is a hang told, is the
rank right, and is there no alert in a pause? Started by scripts/hangs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

import psutil
from builders import ServerProcess, free_port, job_environment
from hangs.job import FAULTS, PAUSES
from tables import replace, table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "evidence" / "detection.md"
JOB = Path(__file__).with_name("job.py")
RULES = ("hang", "rank_absent", "lost_contact", "process_crash")
LEAST_LIMIT_S, LIMIT_TIMES = 15.0, 3.0
LOOKS_EVERY_S = 0.25
STARTS_S, HANGS_S, ENDS_S = 180.0, 120.0, 90.0
STAYS_S = 4.0  # after the alert: it may name more


@dataclass(frozen=True)
class Case:
    """rank: the one with the fault, or the pause."""

    kind: str
    processes: int
    rank: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.processes}-{self.seed}"


@dataclass
class Outcome:
    """told_s: from the last step to the alert; longest_s: the longest step before; ranks, title: as it named them in the
    end."""

    case: Case
    told_s: float | None = None
    longest_s: float = 0.0
    ranks: list[int] = field(default_factory=list)
    title: str = ""
    message: str = ""
    ended: bool = False

    @property
    def limit_s(self) -> float:
        return max(LEAST_LIMIT_S, LIMIT_TIMES * self.longest_s)

    @property
    def in_time(self) -> bool:
        return self.told_s is not None and self.told_s <= self.limit_s

    @property
    def right(self) -> bool:
        return self.told_s is not None and self.ranks == [self.case.rank]


def cases(kinds: Sequence[str], count: int) -> Iterator[Case]:
    for number in range(count):
        processes = 2 + number // len(kinds) % 3
        yield Case(kinds[number % len(kinds)], processes, number // len(kinds) % processes, number // len(kinds))


def run_case(case: Case, server: ServerProcess, folder: Path) -> Outcome:
    folder.mkdir(parents=True)
    processes = [*_start(case, server, folder)]
    try:
        return _watch(case, server, folder, processes)
    finally:
        for process in processes:
            below = []
            with suppress(psutil.Error):
                below = psutil.Process(process.pid).children(recursive=True)
            for one in (process, *below):
                with suppress(psutil.Error):
                    one.kill()
            process.wait()


def _start(case: Case, server: ServerProcess, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    port = str(free_port())
    words = [
        "run",
        "--project",
        "hangs",
        "--name",
        case.name,
        str(JOB),
        case.kind,
        str(case.rank),
        str(case.seed),
        str(folder),
    ]
    for rank in range(case.processes):
        variables = job_environment(
            folder, PERFAGENT_SERVER=server.url, OMP_NUM_THREADS="1", RANK=str(rank), LOCAL_RANK=str(rank),
            WORLD_SIZE=str(case.processes), LOCAL_WORLD_SIZE=str(case.processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )  # fmt: skip
        with (folder / f"output.{rank}").open("wb") as output:
            yield subprocess.Popen(
                [sys.executable, "-m", "perfagent", *words], cwd=folder, env=variables, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip


def _watch(case: Case, server: ServerProcess, folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> Outcome:
    outcome, until, seen_at = Outcome(case), time.time() + STARTS_S, None
    while time.time() < until:
        time.sleep(LOOKS_EVERY_S)
        last, outcome.longest_s = _steps(folder, case.processes)
        if last and seen_at is None:
            until = last + HANGS_S
        alert = next((one for one in _alerts(server, case.name) if one["rule"] in RULES), None)
        if alert is not None:
            seen_at = seen_at or time.time()
            outcome.told_s = outcome.told_s or seen_at - last
            outcome.ranks, outcome.title, outcome.message = alert["ranks"] or [], alert["title"], alert["message"]
            until = min(until, seen_at + STAYS_S)
        if all(one.poll() is not None for one in processes) and not outcome.ended:
            outcome.ended = all(one.poll() == 0 for one in processes)
            until = min(until, time.time() + STAYS_S)
    return outcome


def _steps(folder: Path, ranks: int) -> tuple[float, float]:
    """When the last step ended on any rank, and the longest time from one to the next before."""
    last = longest = 0.0
    for rank in range(ranks):
        with suppress(OSError):
            ends = [float(line) for line in (folder / str(rank)).read_text().splitlines()]
            last = max([last, *ends])
            longest = max([longest, *(later - end for end, later in pairwise(ends))])
    return last, longest


def _alerts(server: ServerProcess, name: str) -> list[dict[str, Any]]:
    with suppress(OSError):
        listed = server.find("/runs", name=name)
        if listed and listed["runs"]:
            found = server.find(f"/runs/{listed['runs'][0]['run']}/alerts")
            return [
                one
                for one in (found or {"alerts": []})["alerts"]
                if one["severity"] == "critical" and one["state"] != "pending"
            ]
    return []


def page(faults: Sequence[Outcome], pauses: Sequence[Outcome]) -> str:
    rows = [_row(kind, [one for one in faults if one.case.kind == kind]) for kind in FAULTS]
    rows.append(_row("all faults", faults))
    quiet = [
        [kind, f"{len(those)}", f"{sum(one.told_s is not None for one in those)}"]
        for kind in (*PAUSES, "all pauses")
        for those in [[one for one in pauses if kind in (one.case.kind, "all pauses")]]
    ]
    head = ["fault", "runs", "reported", "p50", "p90", "limit (longest)", "in time", "rank right"]
    return f"{table(head, [row for row in rows if row[1] != '0'])}\n\n{table(['pause', 'runs', 'alerts'], quiet)}"


def _row(kind: str, those: Sequence[Outcome]) -> list[str]:
    told = sorted(one.told_s for one in those if one.told_s is not None)
    p50, p90 = (
        (quantiles(told, n=10, method="inclusive")[at] for at in (4, 8)) if len(told) > 1 else (told or [0.0]) * 2
    )
    limit = max((one.limit_s for one in those), default=0.0)
    return [
        kind, f"{len(those)}", f"{len(told)}", f"{p50:.1f} s", f"{p90:.1f} s", f"{limit:.1f} s",
        f"{sum(one.in_time for one in those)}", f"{sum(one.right for one in those)}",
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/hangs", description=__doc__)
    parser.add_argument("--faults", type=int, default=100, metavar="N", help="how many (default 100)")
    parser.add_argument("--pauses", type=int, default=100, metavar="N", help="how many (default 100)")
    parser.add_argument("--kinds", nargs="*", default=[*FAULTS, *PAUSES], metavar="KIND", help="those alone")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="how many runs at a time (default 2)")
    parser.add_argument("--write", action="store_true", help="put the table into docs/evidence/detection.md")
    options = parser.parse_args()
    chosen = [
        *cases([kind for kind in FAULTS if kind in options.kinds] or [""], options.faults),
        *cases([kind for kind in PAUSES if kind in options.kinds] or [""], options.pauses),
    ]
    done: list[Outcome] = []
    with (
        tempfile.TemporaryDirectory(prefix="hangs-", ignore_cleanup_errors=True) as name,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        server = ServerProcess(Path(name) / "server", forked=False)
        server.start()
        try:
            running = [pool.submit(run_case, one, server, Path(name) / one.name) for one in chosen if one.kind]
            for future in as_completed(running):
                done.append(future.result())
                print(_line(done[-1]), flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
            server.stop()
    faults, pauses = ([one for one in done if one.case.kind in kinds] for kinds in (FAULTS, PAUSES))
    text = page(faults, pauses)
    print(text)
    if options.write:
        replace("hangs", text, PAGE)
    late = len(faults) - sum(one.in_time for one in faults)
    wrong = len(faults) - sum(one.right for one in faults)
    return int(10 * late > len(faults) or 20 * wrong > len(faults) or any(one.told_s is not None for one in pauses))


def _line(one: Outcome) -> str:
    told = "silent" if one.told_s is None else f"told after {one.told_s:.1f} s (limit {one.limit_s:.1f})"
    good = one.right and one.in_time if one.case.kind in FAULTS else one.told_s is None and one.ended
    return json.dumps({"good": good, "told": told, **asdict(one)})


if __name__ == "__main__":
    sys.exit(main())
