"""What docs/evidence/detection.md and sick-programs.md say of the programs, from what is kept of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sick.batches import Program
from sick.results import Kept
from tables import replace, table

__all__ = ["first_tries", "program_tables", "section", "write"]

PAGES = Path(__file__).resolve().parents[2] / "docs" / "evidence"
UNSEEN = ("unseen_", "pairs_")
"""How the batches begin whose programs were written without sight of the rules."""
_HEAD = ("batch", "", "measured", "sick ones right", "healthy ones with a false alarm", "pairs right")
_HEAD_OF_PROGRAMS = (
    "program",
    "what it is",
    "right are",
    "first try",
    "newest verdict",
    "newest",
    "alert after, s",
    "cause",
)


def write(programs: Sequence[Program], kept: Kept) -> None:
    replace("sick", section(programs, kept), PAGES / "detection.md")
    replace("programs", program_tables(programs, kept), PAGES / "sick-programs.md")


def section(programs: Sequence[Program], kept: Kept) -> str:
    """Figures of each batch, and of all first tries."""
    batches = _batches(programs, kept)
    if not batches:
        return "Not measured yet."
    rows = [row for batch, those in batches.items() for row in _figures(batch, those, kept)]
    known = [program for those in batches.values() for program in those]
    unseen = [program for program in known if program.batch.startswith(UNSEEN)]
    for name, those in (("all", known), ("all that were written without sight of the rules", unseen)):
        rows.append((name, "first try", "", *first_tries(those, kept), ""))
    return table(_HEAD, rows)


def program_tables(programs: Sequence[Program], kept: Kept) -> str:
    """A table of its programs for each batch."""
    parts = [
        f"## Batch {batch}\n\n{table(_HEAD_OF_PROGRAMS, [_cells(program, kept[program.key]) for program in those])}"
        for batch, those in _batches(programs, kept).items()
    ]
    return "\n\n".join(parts) or "Not measured yet."


def _batches(programs: Sequence[Program], kept: Kept) -> dict[str, list[Program]]:
    batches: dict[str, list[Program]] = {}
    for program in programs:
        if program.key in kept:
            batches.setdefault(program.batch, []).append(program)
    return batches


def first_tries(programs: Sequence[Program], kept: Kept) -> tuple[str, str]:
    """Sick ones right, and healthy ones with a false alarm."""
    right = {one.key: bool(kept[one.key]["first"]["right"]) for one in programs}
    false = {one.key: not kept[one.key]["first"]["silent"] for one in programs}
    sick, healthy = ([one.key for one in programs if one.expected.healthy is is_so] for is_so in (False, True))
    return _count(right, sick), _count(false, healthy)


def _figures(batch: str, programs: Sequence[Program], kept: Kept) -> list[tuple[str, ...]]:
    """A row for the first try, and one for the newest runs."""
    rows = []
    for name, part in (("first try", "first"), ("newest", "newest")):
        tries = {one.name: kept[one.key][part] for one in programs if part in kept[one.key]}
        measured = dict.fromkeys(f"{one['began'][:10]}, {one['commit']}{_beside(one)}" for one in tries.values())
        right = {name: all(run["right"] for run in _runs(one)) for name, one in tries.items()}
        false = {name: not all(run["silent"] for run in _runs(one)) for name, one in tries.items()}
        those = [one for one in programs if one.name in tries]
        sick, healthy = ([one.name for one in those if one.expected.healthy is is_so] for is_so in (False, True))
        twins = [(one.name, one.expected.pair) for one in those if one.name in sick and one.expected.pair in tries]
        pairs = [right[name] and right[twin] for name, twin in twins]
        figures = _count(right, sick), _count(false, healthy), _share(sum(pairs), len(pairs))
        rows.append((batch, name, "; ".join(measured), *figures))
    return rows


def _beside(one: Mapping[str, Any]) -> str:
    words = [", beside busy loops"] if one["busy"] else []
    words += [f", {len(one['runs'])} runs"] if len(one.get("runs", ())) > 1 else []
    return "".join(words)


def _runs(one: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return one.get("runs", (one,))


def _count(holds: Mapping[str, bool], names: Sequence[str]) -> str:
    return _share(sum(holds[name] for name in names), len(names))


def _share(number: int, of: int) -> str:
    return f"{number} of {of}" if of else ""


def _cells(program: Program, kept: Mapping[str, Any]) -> tuple[str, ...]:
    runs = _runs(kept["newest"])
    accepted = "healthy" if program.expected.healthy else " or ".join(f"`{rule}`" for rule in program.expected.accept)
    seconds = [run["latency_s"] for run in runs if run["latency_s"] is not None]
    return (
        program.name, program.about.replace("|", "/"), accepted, _right([kept["first"]]),
        " or ".join(dict.fromkeys(f"`{run['verdict']}`" for run in runs)), _right(runs),
        f"{max(seconds):.1f}" if seconds else "", ", ".join(dict.fromkeys(run["cause"] for run in runs if run["cause"])),
    )  # fmt: skip


def _right(runs: Sequence[Mapping[str, Any]]) -> str:
    """`yes`, or how often and why not."""
    wrong = [run for run in runs if not run["right"]]
    faults = "; ".join(dict.fromkeys(fault for run in wrong for fault in run["faults"]))
    if not wrong:
        return "yes"
    often = "no" if len(wrong) == len(runs) else f"{len(runs) - len(wrong)} of {len(runs)} times"
    return f"{often}: {faults}" if faults else often
