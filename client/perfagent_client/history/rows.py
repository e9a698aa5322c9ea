"""Functions that readers of text share: exact numbers, a sentence about values that are not numbers, files packed by gzip."""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from perfagent_client.history.old_run import OldRun

__all__ = ["STEP_COLUMNS", "add_row", "flat", "head_of", "named", "number", "objects", "pieces", "whole_step"]

STEP_COLUMNS = (
    "step", "global_step", "trainer/global_step", "_step", "train_step", "current_steps", "iteration", "iter", "update",
    "num_updates", "epoch",
)  # fmt: skip
"""What counts the steps, the surest first."""
_SPACE = re.compile(r"[\s,]*")
_PIECE = 1 << 16


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


def objects(text: str, at: int) -> tuple[list[Any], int]:
    """Those of a JSON list, from this place in it on; and where what could be read of it ends."""
    found, decoder = list[Any](), json.JSONDecoder()
    try:
        while (at := _SPACE.match(text, at).end()) < len(text) and text[at] == "{":  # type: ignore[union-attr]
            row, at = decoder.raw_decode(text, at)
            found.append(row)
    except (ValueError, RecursionError):
        pass
    return found, at


def named(file: Path) -> Path:
    """The name of what is in it: that of a packed file is without `.gz`."""
    return file.with_suffix("") if file.suffix.lower() == ".gz" else file


def pieces(file: Path, left_out: list[str]) -> Iterator[bytes]:
    """What is in a file; of a packed one as far as it is whole."""
    with file.open("rb") as raw:
        opened = raw if named(file) == file else gzip.GzipFile(fileobj=raw)
        try:
            while data := opened.read1(_PIECE):
                yield data
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            left_out.append(f"{file.name} is cut or damaged: {error}".rstrip(": "))


def head_of(file: Path, size: int) -> bytes:
    """Its first bytes, of a packed file perhaps fewer; none of a file that may not be read."""
    try:
        return next(pieces(file, []), b"")[:size]
    except OSError:
        return b""
