"""What a benchmark found: each claim beside this machine's figure and the condition, then the table the figures come
from."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from perfagent.bench.claims import SOURCES, claims_of

__all__ = ["Figure", "Report", "in_words", "percent", "times"]

WIDTH = 110


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured for one claim. value: in the claim's unit, None where this machine cannot measure it. here: the
    same in words, with what it was measured on. condition: when the claim holds and when it does not, from what was
    seen here."""

    value: float | None
    here: str
    condition: str


@dataclass(slots=True, kw_only=True)
class Report:
    """One run of a benchmark. figures: by the claim's id without the benchmark's name. head, rows: what was measured, a
    table. beside: figures that no claim is about, by a name with its unit."""

    name: str
    device: str
    machine: str
    setup: str
    figures: dict[str, Figure]
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default_factory=tuple)
    beside: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        claimed = {claim.id.partition(".")[2] for claim in claims_of(self.name)}
        if claimed != self.figures.keys():
            raise ValueError(f"the claims of {self.name} are {sorted(claimed)}; the figures are {sorted(self.figures)}")

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `claims` holds for each claim what the source says, what was found here and when it holds."""
        told = dataclasses.asdict(self)
        del told["figures"]
        claims = []
        for claim in claims_of(self.name):
            figure = self.figures[claim.id.partition(".")[2]]
            claims.append(
                {
                    "id": claim.id,
                    "sources": list(claim.sources),
                    "says": claim.says,
                    "unit": claim.unit,
                    "least": claim.least,
                    "most": claim.most,
                    "value": figure.value,
                    "here": figure.here,
                    "compared": claim.compared(figure.value),
                    "condition": figure.condition,
                }
            )
        return told | {"claims": claims}

    def text(self) -> str:
        """For people: a paragraph for each claim, then the table."""
        lines = [f"{self.name}: {self.machine}", self.setup, ""]
        for claim in self.as_dict()["claims"]:
            named = "; ".join(f"{source}, {SOURCES[source]}" for source in claim["sources"])
            lines += _paragraph("claim", f"{claim['says']} ({named})")
            lines += _paragraph("here", f"{claim['here']}: {in_words(claim['compared'])}")
            lines += [*_paragraph("condition", claim["condition"]), ""]
        cells = [list(self.head), *([*row] for row in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.head))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        return "\n".join([*lines, *(["", *self.notes] if self.notes else [])])


def in_words(compared: str) -> str:
    """What `Claim.compared` says, as the end of a sentence."""
    return {
        "within": "as claimed",
        "below": "less than claimed",
        "above": "more than claimed",
        "no figure": "the source gives no figure",
        "not measured": "not measured",
    }[compared]


def times(ratio: float) -> str:
    return f"{ratio:.2f} times"


def percent(share: float) -> str:
    """share: 0..100."""
    return f"{share:.0f} %" if abs(share) >= 10 else f"{share:.1f} %"


def _paragraph(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"  {label:<10} ", subsequent_indent=" " * 13, break_on_hyphens=False
    )
