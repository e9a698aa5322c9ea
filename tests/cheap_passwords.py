"""argon2id at its least cost for the users of tests: a hash or a check takes 0.3 s of a core at the cost of servers."""

from __future__ import annotations

from pwdlib import PasswordHash
from pwdlib.hashers.argon2 import Argon2Hasher

__all__ = ["full_cost", "use"]

full_cost = PasswordHash.recommended
"""The hash of servers: for tests of the cost itself."""


def use() -> None:
    """In this process, and in those that are forked from it."""
    cheapest = PasswordHash((Argon2Hasher(time_cost=1, memory_cost=8, parallelism=1),))
    PasswordHash.recommended = lambda: cheapest  # type: ignore[method-assign]
