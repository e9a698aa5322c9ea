"""What came of each library, and docs/evidence/libraries.md, which says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from libraries.catalogue import LIBRARIES, Library
from libraries.comparing import COLUMNS

__all__ = ["PAGE", "Result", "document"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "libraries.md"

HEAD = """\
# Libraries

Written by `scripts/libraries --write`; do not edit by hand.

Each row is a real training of a few steps with a library's own trainer (benchmarks/libraries/trainings). It runs twice: plain,
and under `perfagent run`. The script notes its own losses, norms and step counts, and the suite compares that with what perfagent
recorded. The project does not depend on these libraries, so `scripts/test` does not run this suite. The trainings that it does
run, and the known limits, are in [compatibility.md](compatibility.md).

"""


@dataclass
class Result:
    """What came of one library. columns: what was compared -> what is wrong there. trouble: why nothing could be
    compared."""

    of: Library
    version: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    trouble: str = ""

    @property
    def right(self) -> bool:
        return not self.trouble and not any(self.columns.values())

    @property
    def words(self) -> str:
        if self.trouble:
            return self.trouble
        return (
            "right"
            if self.right
            else "; ".join(f"{column}: {wrong}" for column, wrong in self.columns.items() if wrong)
        )


def document(results: list[Result], before: str, day: str) -> str:
    """docs/evidence/libraries.md. before: the page as it was."""
    kept = {
        line.split("|")[1].strip(): line for line in before.splitlines() if line.startswith("| ") and "|" in line[2:]
    }
    for one in results:
        cells = [one.of.name, one.version, one.of.trained, ", ".join(one.columns), str(one.steps or ""), one.words, day]
        kept[one.of.name] = "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
    lines = [kept[library.name] for library in LIBRARIES if library.name in kept]
    right = sum(line.split("|")[6].strip() == "right" for line in lines)
    columns = "\n".join(f"| {column} | {meaning} |" for column, meaning in COLUMNS.items())
    table = (
        "| library | version | what is trained | compared | steps | result | date |\n|---|---|---|---|---|---|---|\n"
    )
    legend = (
        'A column is missing under "compared" if the script does not know the figure, or if the agent does not report it for '
        "that library. The source of the training says which."
    )
    meanings = f"| compared | it is right when |\n|---|---|\n{columns}\n"
    return f"{HEAD}**{right}/{len(lines)} right.**\n\n{table}" + "\n".join(lines) + f"\n\n{legend}\n\n{meanings}"
