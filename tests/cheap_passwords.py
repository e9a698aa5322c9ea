"""The cheapest argon2id, for users in tests. At the cost that servers use, each hash and each check takes 0.3 s of a core."""

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
