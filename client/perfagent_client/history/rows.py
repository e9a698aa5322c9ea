"""Functions that readers of tables share: exact numbers, and a sentence about values that are not numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from perfagent_client.history.old_run import OldRun

__all__ = ["STEP_COLUMNS", "add_row", "flat", "head_of", "number", "whole_step"]

STEP_COLUMNS = (
    "step", "global_step", "trainer/global_step", "_step", "train_step", "current_steps", "iteration", "iter", "update",
    "num_updates", "epoch",
)  # fmt: skip
"""What counts the steps, the surest first."""


def add_row(
    run: OldRun, step: int, values: Iterable[tuple[str, Any]], others: Counter[str], time: float = math.nan
) -> None:
    """Adds what is a number; counts what is none. An empty cell, or null, is no value."""
    for name, value in values:
        if value is None or value == "":
            continue
        found = number(value)
        if found is None:
            others[f"values of `{str(name)[:60]}` that are no numbers"] += 1
        else:
            run.add(name, step, found, time)


def number(value: Any) -> float | None:
    """The float64 that is written: a number, or the text of one ("1.5", "NaN", "-Infinity")."""
    kind = type(value)
    if kind is float:
        return float(value)
    try:
        return float(value) if kind is int or (kind is str and "_" not in value) else None
    except (ValueError, OverflowError):
        return None


def whole_step(value: Any) -> int | None:
    """A step: whole, 0 and more, below 2**53."""
    found = number(value)
    return int(found) if found is not None and 0 <= found < 2**53 and found == int(found) else None


def flat(row: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested objects, with `/` between their names. An object with `_type`, such as an image, is a value."""
    for name, value in row.items():
        if isinstance(value, dict) and "_type" not in value:
            yield from flat(value, f"{before}{name}/")
        else:
            yield before + name, value


def head_of(file: Path, size: int) -> bytes:
    """Its first bytes; none of a file that may not be read."""
    try:
        with file.open("rb") as opened:
            return opened.read(size)
    except OSError:
        return b""
