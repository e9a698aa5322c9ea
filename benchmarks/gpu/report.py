"""What a check found: expected beside measured; as a table for the terminal, as JSON, and as a section of
docs/evidence/gpu.md."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["Result", "Status", "compared", "markdown", "not_checked", "save", "table"]

Status = Literal["pass", "FAIL", "not checked"]


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. measured and expected: in words, with units."""

    check: str
    expected: str
    measured: str
    status: Status
    note: str = ""


def compared(
    check: str,
    measured: float,
    expected: float,
    *,
    unit: str,
    share: float = 0.0,
    within: float = 0.0,
    source: str = "",
) -> Result:
    """Two figures that must agree: off by at most `share` of the expected one, or by `within` units, whichever is
    more."""
    allowed = max(share * abs(expected), within)
    room = f"± {100 * share:g} %" if share * abs(expected) >= within else f"± {within:g} {unit}"
    said = f"{_figure(expected)} {unit} {room}" + (f" ({source})" if source else "")
    return Result(check, said, f"{_figure(measured)} {unit}", "pass" if abs(measured - expected) <= allowed else "FAIL")


def not_checked(check: str, reason: str) -> Result:
    return Result(check, "-", "-", "not checked", reason)


def table(results: Sequence[Result]) -> str:
    """Columns for a terminal."""
    rows = [("check", "expected", "measured", "")]
    rows += [
        (one.check, one.expected, one.measured, one.status + (f": {one.note}" if one.note else "")) for one in results
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows
    )


def markdown(machine: dict[str, Any], results: Sequence[Result]) -> str:
    """A section for docs/evidence/gpu.md: which machine, when, and the table."""
    passed = sum(one.status == "pass" for one in results)
    failed = sum(one.status == "FAIL" for one in results)
    rest = len(results) - passed - failed
    lines = [
        f"### {machine['device']}, {machine['date']}",
        "",
        f"{machine['words']}. {passed} passed, {failed} failed, {rest} not checked.",
        "",
        "| check | expected | measured | |",
        "|---|---|---|---|",
    ]
    for one in results:
        cells = (one.check, one.expected, one.measured, one.status + (f": {one.note}" if one.note else ""))
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def save(folder: Path, machine: dict[str, Any], results: Sequence[Result]) -> None:
    """results.json and section.md."""
    told = {"machine": machine, "results": [dataclasses.asdict(one) for one in results]}
    (folder / "results.json").write_text(json.dumps(told, indent=2) + "\n", "utf-8")
    (folder / "section.md").write_text(markdown(machine, results), "utf-8")


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
