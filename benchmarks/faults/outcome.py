"""What came of a row: how many of how many survived, and the figures behind it in words."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """row: its id in the fault matrix; name: what was done, and what must hold. required: enough of them, all by
    default."""

    row: str
    name: str
    survived: int
    total: int
    figures: str
    required: int | None = None

    @property
    def good(self) -> bool:
        return self.total > 0 and self.survived >= (self.total if self.required is None else self.required)
