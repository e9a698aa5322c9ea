"""A page of text: sections of lines and tables, made to fit into so many lines. Pure.

Each section says how few of its lines it can do with. Where all of them together are too long, the least important
gives way first and says how many lines `--all` adds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from perfagent.command_line.terminal_output import Line, Table
from perfagent.wire.quantities import some

__all__ = ["Section", "fitted", "flat"]


@dataclass(slots=True)
class Section:
    """least: lines that stay when the page is too long. Of two, the one with the higher `gives_way` is cut first."""

    title: str
    parts: list[Line | Table] = field(default_factory=list)
    least: int = 2
    gives_way: int = 0

    def __len__(self) -> int:
        return sum(len(part) if isinstance(part, Table) else 1 for part in self.parts)


def fitted(page: list[Section], most: int) -> list[Section]:
    """The page in at most so many lines, titles and the blanks between sections counted."""
    over = sum(_height(section) for section in page) - most
    for section in sorted(page, key=lambda section: -section.gives_way):
        if over <= 0:
            break
        keep = max(min(section.least, len(section)), len(section) - over)
        if keep < len(section):
            over -= len(section) - keep
            _cut(section, keep)
    left = list(page)
    while over > 0 and len(left) > 2:  # a terminal of few lines: head and verdict stay
        section = max(left, key=lambda section: section.gives_way)
        left.remove(section)
        over -= _height(section)
    for section in left[::-1]:
        if over > 0 and len(section) > 1:
            keep = max(1, len(section) - over)
            over -= len(section) - keep
            _cut(section, keep)
    return left


def flat(page: list[Section]) -> list[Line | Table]:
    """What stands below each other: titles, and a blank line in front of each."""
    parts: list[Line | Table] = []
    for section in page:
        parts += [Line(), Line(section.title, "bold")] if section.title else []
        parts += section.parts
    return parts


def _height(section: Section) -> int:
    return len(section) + (2 if section.title else 0)


def _cut(section: Section, keep: int) -> None:
    """Leaves `keep` lines, the last of which says how many are gone."""
    gone = len(section) - (keep - 1)
    left, kept = keep - 1, list[Line | Table]()
    for whole in section.parts:
        if left <= 0:
            break
        part = replace(whole, rows=whole.rows[: left - 1]) if isinstance(whole, Table) and len(whole) > left else whole
        kept.append(part)
        left -= len(part) if isinstance(part, Table) else 1
    section.parts = [*kept, Line(f"  ... {some(gone, 'more line')}: --all", "dim")]
