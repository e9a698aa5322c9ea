"""A run asked about again and again, by commands that watch it: until it ends, and over a server that is away for a
while."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from perfagent.errors import ServerUnreachable
from perfagent.wire import BAD_ENDS

__all__ = ["ENDED", "Patience"]

T = TypeVar("T")

ENDED = ("finished", *BAD_ENDS)
AWAY_S = 30.0


class Patience:
    """Asks on while a server that has answered once is away, for `away_s`. The first question must be answered at
    once."""

    def __init__(self, away_s: float = AWAY_S, retry_s: float = 1.0) -> None:
        self._away_s, self._retry_s = away_s, retry_s
        self._answered = False

    def ask(self, question: Callable[[], T]) -> T:
        until: float | None = None
        while True:
            try:
                answer = question()
            except ServerUnreachable as error:
                if not self._answered or (until is not None and time.monotonic() > until):
                    raise
                if until is None:
                    until = time.monotonic() + self._away_s
                    sys.stderr.write(f"perfagent: {error}; asking again for {self._away_s:.0f} s\n")
                time.sleep(self._retry_s)
            else:
                self._answered = True
                return answer
