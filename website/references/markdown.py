"""Pieces of Markdown that the pages have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["note", "table"]


def note(source: str) -> str:
    """Says to whoever opens the file where its text comes from."""
    return f"<!-- Written by scripts/references from {source}. Change it there. -->\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *(map(_cell, row) for row in rows))]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
