"""Trains with each library, without the agent and with it, and prints what came of each. Started by scripts/libraries.

What is compared is in comparing.py; --write puts the results into docs/evidence/libraries.md.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from pathlib import Path

from agent_recorded import recorded
from libraries.catalogue import LIBRARIES, Library
from libraries.comparing import compared
from libraries.environments import NotInstalledError, interpreter, version
from libraries.page import PAGE, Result, document
from libraries.running import TRAININGS, FailedError, both


def result(library: Library, environments: Path) -> Result:
    try:
        python = interpreter(environments, library)
    except NotInstalledError as error:
        return Result(library, trouble=f"not installed: {str(error)[:300]}")
    found = Result(library, version(python, library) or "")
    # A process that a library left behind may still write into the folder while it is removed.
    with tempfile.TemporaryDirectory(prefix=f"libraries-{library.name}-", ignore_cleanup_errors=True) as folder:
        try:
            alone, watched = both(python, TRAININGS / f"with_{library.name}.py", Path(folder))
        except FailedError as error:
            found.trouble = str(error)
            return found
        record = Path(folder) / "watched" / "record"
        found.columns = compared(alone, watched, recorded(record) if record.exists() else [])
        found.steps = len(watched.truth["steps"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/libraries", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="libraries; all without a name")
    parser.add_argument("--list", action="store_true", help="say which there are, and train nothing")
    parser.add_argument("--write", action="store_true", help="put the results into docs/evidence/libraries.md")
    parser.add_argument(
        "--folder", type=Path, help="where virtual environments are made and kept; a temporary folder without it"
    )
    options = parser.parse_args()
    if unknown := set(options.names) - {library.name for library in LIBRARIES}:
        parser.error(f"unknown {sorted(unknown)}; these are: {', '.join(library.name for library in LIBRARIES)}")
    chosen = [library for library in LIBRARIES if not options.names or library.name in options.names]
    if options.list:
        for library in chosen:
            print(f"{library.name:22} {library.trained} ({' '.join(library.requirements)})")
        return 0
    results = []
    with tempfile.TemporaryDirectory(prefix="libraries-") as temporary:
        for library in chosen:
            one = result(library, (options.folder or Path(temporary)).resolve())
            results.append(one)
            compared_too = f" ({one.steps} steps; {', '.join(one.columns)})" if one.columns else ""
            print(f"{library.name:22} {one.version:10} {one.words}{compared_too}", flush=True)
    right = sum(one.right for one in results)
    print(f"{right}/{len(results)}")
    if options.write:
        before = PAGE.read_text("utf-8") if PAGE.exists() else ""
        PAGE.write_text(document(results, before, f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"), "utf-8")
    return 0 if right == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
