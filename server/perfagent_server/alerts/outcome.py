"""What became of one try to send something."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """status: of the answer, as HTTP has it; None where there was none. error: what went wrong, in words; retry_after: what
    the receiver asked for, as it wrote it."""

    status: int | None
    error: str
    retry_after: str | None = None

    @property
    def delivered(self) -> bool:
        return self.status is not None and 200 <= self.status < 300
