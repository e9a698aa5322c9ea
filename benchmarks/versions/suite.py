"""Measures the agent with other versions of torch and Python, one environment after the other. Started by scripts/versions."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from compatibility import page
from versions import section
from versions.catalogue import TORCHES, trainings
from versions.measuring import PARTS, NoPythonError, NotInstalledError, measured, python_for


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/versions", description=__doc__)
    parser.add_argument("torches", nargs="*", metavar="TORCH", help=f"such as 2.9.1; default: {' '.join(TORCHES)}")
    parser.add_argument(
        "--python", metavar="PROGRAM", help="default: the oldest on PATH, from 3.11 on, that has wheels"
    )
    parser.add_argument("--list", action="store_true", help="say what would be measured, and measure nothing")
    parser.add_argument("--keep", action="store_true", help="leave each environment where it is, to be used again")
    parser.add_argument("--only", choices=PARTS, help="measure one part anew, and leave the others as they were")
    parser.add_argument("--folder", type=Path, help="where environments are made; a temporary folder without it")
    options = parser.parse_args()
    if options.keep and options.folder is None:
        parser.error("--keep needs --folder")
    with tempfile.TemporaryDirectory(prefix="versions-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        well = [one(torch, options, folder) for torch in options.torches or TORCHES]
    return 0 if all(well) else 1


def one(torch: str, options: argparse.Namespace, folder: Path) -> bool:
    try:
        python = options.python or python_for(torch)
        if options.list:
            print(f"{torch:8} {python:12} {len(trainings(torch))} trainings")
            return True
        result = measured(torch, python, folder, [options.only] if options.only else PARTS)
    except (NoPythonError, NotInstalledError) as error:
        print(f"{torch:8} not measured: {error}", flush=True)
        return False
    finally:
        if not options.keep:
            for place in folder.glob(f"torch-{torch}-*"):
                shutil.rmtree(place)
    result = section.keep(result)
    page.PAGE.write_text(page.document(), "utf-8")
    print(section.in_words(result), flush=True)
    return section.is_right(result)


if __name__ == "__main__":
    sys.exit(main())
