"""Counts the mutants that the tests of a commit kill. scripts/mutants starts it. It keeps its results in build/mutants/."""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from mutants.comparing import report
from mutants.rooms import DRAWN_FROM, MUTANTS, ROOMS, TESTS, Mutant, Placed
from mutants.running import BUDGET_S, Forker, Result, checkout, environment, options, result, try_all
from mutants.sample import draw, place
from mutants.touching import Case, Touched, gathered

KEPT = Path(__file__).resolve().parents[2] / "build" / "mutants"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("cover", "which tests touch which lines"),
        ("run", "tries the mutants; goes on where it stopped"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--commit", default="HEAD")
        command.add_argument("--jobs", type=int, default=2, help="processes at once")
        command.add_argument(
            "--since", metavar="C", help="only what changed since C, for which the same was done before"
        )
    command.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    command.add_argument("--count", type=int, default=MUTANTS, help=f"mutants a room; {MUTANTS} unless told")
    command.add_argument("--killed-by", metavar="C", help="only those that the tests of C kill: no other can be lost")
    command.add_argument(
        "--budget", type=float, default=BUDGET_S, help="seconds of tests for a mutant, of their CPU time"
    )
    command.add_argument("--again", nargs="+", default=[], metavar="ID", help="these once more, though they were tried")
    command = commands.add_parser("compare", help="a table, room by room")
    command.add_argument("before")
    command.add_argument("now")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no checkout is left
    if given.command == "cover":
        cover(_full(given.commit), given.jobs, given.since and _full(given.since))
    elif given.command == "run":
        carry(given.since and _full(given.since), _full(given.commit))
        run(
            _full(given.commit),
            given.rooms,
            given.count,
            given.jobs,
            _killed_by(given.killed_by),
            given.again,
            given.budget,
        )
    else:
        names = (given.before[:8], given.now[:8])
        print(report(_results(_full(given.before)), _results(_full(given.now)), names))


def cover(commit: str, jobs: int, since: str | None) -> None:
    """Runs the tests of the rooms once; since another commit only the files that are not the same there."""
    folder = _folder(commit)
    raw = folder / "cover"
    shutil.rmtree(raw, ignore_errors=True)
    raw.mkdir()
    began = time.monotonic()
    with checkout(commit) as path:
        wanted = [name for name in TESTS if (path / name).exists()]
        if since is not None:
            wanted = sorted(name for name in _changed(since, commit) if (path / name).exists())
        rooms = ":".join(str(path / room) for room in ROOMS.values())
        command = [sys.executable, "-m", "pytest", "-p", "touched_lines", *options(path)]
        command += ["-n", str(jobs), "--dist", "worksteal", *wanted]
        inside = environment(path, MUTANTS_COVER=str(raw), MUTANTS_ROOMS=rooms)
        if wanted:
            subprocess.run(command, cwd=path, env=inside, check=False)
        keep(commit, gathered(raw, path), since)
    print(f"{time.monotonic() - began:.0f} s")


def keep(commit: str, touched: Touched, since: str | None) -> None:
    if since is not None:
        changed = _changed(since, commit)
        older = Touched.read(_folder(since) / "touched.json.gz")
        touched = older.with_fresh(
            touched, lambda test: test.partition("::")[0] not in changed, _sources(since), _sources(commit)
        )
    touched.write(_folder(commit) / "touched.json.gz")
    failed = [test.id for test in touched.tests if not test.passed]
    print(f"{len(touched.tests)} tests, {len(failed)} of them failed and are left out", *failed, sep="\n  ")


def _changed(since: str, commit: str) -> set[str]:
    """The files with tests that differ, also those that are no more."""
    names = _git("diff", "--name-only", "--no-renames", since, commit, "--", *TESTS).splitlines()
    return {name for name in names if Path(name).name.startswith("test_")}


def run(
    commit: str,
    rooms: Sequence[str],
    count: int,
    jobs: int,
    wanted: set[str] | None,
    again: Sequence[str],
    budget_s: float,
) -> None:
    """Writes a line for each mutant as soon as it is tried. wanted: their ids, or None for all; again: only these, once more."""
    if not (_folder(commit) / "touched.json.gz").exists():
        sys.exit(f"first: scripts/mutants cover --commit {commit}")
    touched = Touched.read(_folder(commit) / "touched.json.gz")
    known = _results(commit)
    sources = _sources(commit)
    began = time.monotonic()

    def work() -> Iterator[tuple[Mutant, Placed, list[Case]]]:
        for mutant in [one for room in rooms for one in _drawn(room, count)]:
            asked = mutant.id in again if again else mutant.id not in known
            if not asked or not (wanted is None or mutant.id in wanted):
                continue
            placed = place(mutant, sources[mutant.file]) if mutant.file in sources else None
            if placed is None:
                done(result(mutant, 0, "gone"))
            else:
                yield mutant, placed, touched.of(mutant.file, placed.line, sources)

    def done(one: Result) -> None:
        with (_folder(commit) / "mutants.jsonl").open("a") as file:
            file.write(json.dumps(asdict(one)) + "\n")
        where = f"{one.file}:{one.line} {one.operator} ({one.nth})"
        print(f"{one.id} {one.ended:9} {one.took_s:5.0f} s of {one.ran:4} tests: {where} {one.by}", flush=True)

    with ExitStack() as stack:
        forkers = []
        for number in range(jobs):
            forkers.append(Forker(stack.enter_context(checkout(commit)), _folder(commit) / f"pytest-{number}.log"))
            stack.callback(forkers[-1].close)
        try_all(forkers, work(), done, budget_s)
    print(f"{time.monotonic() - began:.0f} s")


def carry(since: str | None, commit: str) -> None:
    """Takes over the mutants that a test killed whose file, like that of the mutant, has not changed since."""
    if since is None:
        return
    changed, known, sources = _changed(since, commit), _results(commit), _sources(commit)
    with (_folder(commit) / "mutants.jsonl").open("a") as file:
        for one in _results(since).values():
            same = sources.get(one.file) == _sources(since)[one.file] and one.by.partition("::")[0] not in changed
            if one.ended == "killed" and "::" in one.by and same and one.id not in known:
                file.write(json.dumps(asdict(one)) + "\n")


def _killed_by(commit: str | None) -> set[str] | None:
    if commit is None:
        return None
    return {one.id for one in _results(_full(commit)).values() if one.killed}


def _drawn(room: str, count: int) -> list[Mutant]:
    """Kept, as to draw takes 10 seconds a room."""
    kept = KEPT / f"drawn-{room}-{count}.json"
    if not kept.exists():
        mutants = draw(room, _sources(DRAWN_FROM), count)
        kept.write_text(json.dumps([asdict(mutant) for mutant in mutants], indent=1))
    return [Mutant(**mutant) for mutant in json.loads(kept.read_text())]


def _results(commit: str) -> dict[str, Result]:
    """The newest of each mutant."""
    path = _folder(commit) / "mutants.jsonl"
    rows = path.read_text().splitlines() if path.exists() else []
    return {row["id"]: Result(**row) for row in map(json.loads, rows)}


@functools.cache
def _sources(commit: str) -> dict[str, str]:
    """The files of all rooms."""
    names = _git("ls-tree", "-r", "--name-only", commit, *ROOMS.values()).splitlines()
    return {name: _git("show", f"{commit}:{name}") for name in names if name.endswith(".py")}


def _full(commit: str) -> str:
    return _git("rev-parse", f"{commit}^{{commit}}").strip()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def _folder(commit: str) -> Path:
    folder = KEPT / commit[:12]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    main()
