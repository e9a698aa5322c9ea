"""Runs whose verdicts are alike, together: a list of runs is then no longer than what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

__all__ = ["MOST_RUNS", "AlikeRuns", "alike_runs"]

MOST_RUNS = 200
"""Runs that need somebody, of which a page knows the verdicts."""


@dataclass(slots=True)
class AlikeRuns:
    """key: names the group; rows: as GET /runs shows them, with their verdicts."""

    key: str
    rows: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Of the verdict, with "…" where the runs differ."""
        titles = {said_of(row) for row in self.rows}
        return titles.pop() if len(titles) == 1 else str(self.rows[0]["verdict"]["alike"])


def said_of(row: Mapping[str, Any]) -> str:
    verdict = row["verdict"]
    return str(verdict["title"] or verdict["message"])


def alike_runs(rows: Sequence[Mapping[str, Any]]) -> list[AlikeRuns]:
    """In the order of their first rows."""
    groups: dict[str, AlikeRuns] = {}
    for row in rows:
        verdict = row["verdict"]
        said = "\0".join((verdict["outcome"], verdict["rule"], verdict["alike"]))
        key = blake2b(said.encode(), digest_size=8).hexdigest()
        groups.setdefault(key, AlikeRuns(key)).rows.append(row)
    return [*groups.values()]
