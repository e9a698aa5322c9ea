"""What a benchmark found: each figure with the condition under which the technique helps, then the table of the
figures."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Figure", "Report", "percent", "times"]

WIDTH = 110


@dataclass(frozen=True, slots=True)
class Figure:
    """One gain. value: None where this machine cannot measure it. here: the gain in words. condition: when the technique
    helps, and when it does not."""

    value: float | None
    here: str
    condition: str


@dataclass(slots=True, kw_only=True)
class Report:
    """One run of a benchmark. head, rows: what was measured, a table. beside: more figures, by a name with its unit."""

    name: str
    device: str
    machine: str
    setup: str
    figures: dict[str, Figure]
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default_factory=tuple)
    beside: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    def text(self) -> str:
        """For people: a paragraph for each figure, then the table."""
        lines = [f"{self.name}: {self.machine}", self.setup, ""]
        for name, figure in self.figures.items():
            lines += _paragraph(name, figure.here if figure.value is not None else f"{figure.here} (not measured)")
            lines += [*_paragraph("", figure.condition), ""]
        cells = [list(self.head), *([*row] for row in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.head))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        return "\n".join([*lines, *(["", *self.notes] if self.notes else [])])


def times(ratio: float) -> str:
    return f"{ratio:.2f} times"


def percent(share: float) -> str:
    """share: 0..100."""
    return f"{share:.0f} %" if abs(share) >= 10 else f"{share:.1f} %"


def _paragraph(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"  {label:<12} ", subsequent_indent=" " * 15, break_on_hyphens=False
    )
