"""What became of one try to deliver a message."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """status: of the receiver's answer; None when it gave none, or when it refused the message in an answer of 200.
    error: why it is not delivered, fit for a database and for people: no secret is in it. retry_after: the header as it
    was sent, seconds or a date."""

    status: int | None
    error: str
    retry_after: str | None = None

    @property
    def delivered(self) -> bool:
        return self.status is not None and 200 <= self.status < 300
