"""Which versions of torch are measured, on which Python, and which trainings. Needs the standard library only."""

from __future__ import annotations

import re
from pathlib import Path

from agent.frameworks.matrix import COMPILE, PARALLEL, PLAIN, PRECISION, ROWS, SEVERAL, Row

__all__ = ["ROOT", "TORCHES", "TRAININGS", "newest_python", "numbers", "pinned", "trainings", "unit_tests"]

ROOT = Path(__file__).resolve().parents[2]
TRAININGS = tuple(row for row in ROWS if row.family in (PLAIN, SEVERAL, PRECISION, COMPILE, PARALLEL))
"""The rows of the matrix that need torch alone."""


def pinned() -> str:
    """The torch of constraints.txt."""
    return re.findall(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)[0]


TORCHES = ("2.4.1", "2.6.0", "2.8.0", "2.10.0", pinned())


def numbers(version: str) -> tuple[int, ...]:
    """(2, 13, 0) of 2.13.0+cpu."""
    return tuple(map(int, version.split("+")[0].split(".")))


def newest_python(torch: str) -> tuple[int, int]:
    """The newest Python that has wheels of this torch on PyPI, as far as it is known here."""
    for below, python in (((2, 6), (3, 12)), ((2, 9), (3, 13))):
        if numbers(torch) < below:
            return python
    return (3, 14)


def unit_tests(torch: str) -> list[str]:
    """Files of tests: all of the agent's with the pinned torch; with another, those that import torch."""
    files = sorted((ROOT / "tests" / "agent").rglob("test_*.py"))
    imports = re.compile(r"^\s*(import|from) (torch|agent\.hooks)\b", re.MULTILINE)
    chosen = files if torch == pinned() else [file for file in files if imports.search(file.read_text("utf-8"))]
    return [str(file.relative_to(ROOT)) for file in chosen]


def trainings(torch: str) -> list[Row]:
    """Those that this torch can run."""
    return [row for row in TRAININGS if row.exists_in(torch)]
