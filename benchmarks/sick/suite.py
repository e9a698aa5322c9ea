"""Runs sick trainings and their healthy look-alikes under perfagent or another tool, and says about which it was right.
Started by scripts/sick."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from sick import page, results
from sick.batches import Program, all_programs, chosen
from sick.judging import Judgment, judged
from sick.running import Record, run_program, stopping
from sick.tools import Perfagent, Tool, tool_of

from perfagent.wire.quantities import some

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "build" / "sick"
_BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/sick", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME|BATCH", help="programs and batches; all without a name")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many programs run at a time (default 1)")
    parser.add_argument("--busy", action="store_true", help="beside a busy loop on each core")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="so many times; right is right in each")
    parser.add_argument(
        "--write",
        action="store_true",
        help="put the results into benchmarks/results/sick.json and docs/evidence/detection.md",
    )
    parser.add_argument("--again", type=Path, metavar="FILE", help="judge a recorded suite again, and run nothing")
    parser.add_argument("--tool", type=Path, metavar="FILE.py", help="another tool: a subclass of sick.tools.Tool")
    options = parser.parse_args()
    if options.write and options.tool:
        parser.error("--write is for perfagent's own results, not for those of --tool")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    try:
        programs = chosen(options.names)
        tool = tool_of(options.tool) if options.tool else Perfagent()
    except ValueError as error:
        parser.error(str(error))
    records = _recorded(options.again) if options.again else _records(programs, tool, options)
    right = _tell(programs, records, write=options.write)
    return 0 if right else 1


def _tell(programs: Sequence[Program], records: Iterator[Record], *, write: bool) -> bool:
    """Judges each record as it comes, prints a line, and keeps it; at the end the counts. Says whether all were right."""
    by_key, done = {one.key: one for one in programs}, defaultdict(list)
    for record in records:
        program = by_key.get(f"{record['batch']}/{record['program']}")
        if program is None:
            continue
        judgment = judged(record, program.expected)
        done[record["run"]].append((program, judgment))
        print(_line(program, record, judgment), flush=True)
        if write and record["tool"] == Perfagent.name:
            kept = results.read()
            results.keep(kept, record, judgment)
            everything = all_programs()
            results.write(kept, [one.key for one in everything])
            page.write(everything, kept)
    for run, those in done.items():
        print(_counts(run, those))
    return bool(done) and all(judgment.right for those in done.values() for _, judgment in those)


def _recorded(file: Path) -> Iterator[Record]:
    yield from map(json.loads, file.read_text("utf-8").splitlines())


def _records(programs: Sequence[Program], tool: Tool, options: argparse.Namespace) -> Iterator[Record]:
    """Each as soon as it is there, and in the file by then: a suite that is stopped loses only what runs."""
    began, commit = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), _commit()
    RECORDS.mkdir(parents=True, exist_ok=True)
    file = RECORDS / f"{began[:19].replace(':', '')}.jsonl"
    print(f"{some(len(programs), 'program')} under {tool.name}; records in {file.relative_to(ROOT)}", flush=True)
    suite = {"began": began, "commit": commit, "busy": options.busy, "tool": tool.name}
    with file.open("a", encoding="utf-8") as kept, _busy_loops() if options.busy else contextlib.nullcontext():
        for run in range(1, options.runs + 1):
            for record in _one_run(programs, tool, options.jobs):
                record = {**suite, "run": run, **record}
                kept.write(json.dumps(record, default=str) + "\n")
                kept.flush()
                yield record


def _one_run(programs: Sequence[Program], tool: Tool, jobs: int) -> Iterator[Record]:
    for batch in dict.fromkeys(one.batch for one in programs):
        those = [one for one in programs if one.batch == batch]
        with _folder() as folder, _started(tool, folder / "tool"), ThreadPoolExecutor(jobs) as pool:
            running = [pool.submit(run_program, one, tool, folder / one.name) for one in those]
            try:
                yield from (future.result() for future in as_completed(running))
            except BaseException:
                stopping.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sick-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextlib.contextmanager
def _started(tool: Tool, folder: Path) -> Iterator[None]:
    try:
        tool.start(folder)
        yield
    finally:
        tool.stop()


@contextlib.contextmanager
def _busy_loops() -> Iterator[None]:
    """One on each core. They end with us at the latest."""
    command = [sys.executable, "-c", _BUSY, str(os.getpid())]
    loops = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _commit() -> str:
    words = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


# ---- words


def _line(program: Program, record: Record, judgment: Judgment) -> str:
    """One line; of a wrong one, also what was expected, and what was said."""
    told = "right" if judgment.right else f"WRONG: {'; '.join(judgment.faults)}"
    notes = [f"cause {judgment.cause}"] if judgment.cause else []
    notes += judgment.notes
    seconds = "-" if judgment.latency_s is None else f"{judgment.latency_s:.1f} s"
    figures = f"{judgment.state or '-':9} {judgment.verdict or '-':20} {seconds:>7}  {told}"
    line = f"{program.key:28} {figures}{''.join(f' [{note}]' for note in notes)} {record['wall_s']:.0f} s"
    if judgment.right:
        return line
    alerts = ", ".join(judgment.alerts) or "none"
    words = textwrap.shorten(judgment.message, 260)
    return f"{line}\n    expected {' or '.join(program.expected.accept)}; alerts: {alerts}\n    {words}"


def _counts(run: int, done: Sequence[tuple[Program, Judgment]]) -> str:
    right = [judgment.right for _, judgment in done]
    sick = [judgment.right for program, judgment in done if not program.expected.healthy]
    silent = [judgment.silent for program, judgment in done if program.expected.healthy]
    parts = ("right", right), ("sick ones right", sick), ("healthy ones silent", silent)
    return f"run {run}: " + ", ".join(f"{sum(those)} of {len(those)} {words}" for words, those in parts)


if __name__ == "__main__":
    sys.exit(main())
