"""Passwords of people: argon2id by pwdlib. A check takes a tenth of a second of one core and more, so that few run at
once, and none on the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from pwdlib import PasswordHash

from perfagent_server.refusal import RefusalError

__all__ = ["LONGEST", "SHORTEST", "Passwords", "why_not"]

SHORTEST, LONGEST = 10, 256  # characters
_AT_ONCE = 2
_WAITING = 32
# Of a password that nobody knows, with the parameters of pwdlib's recommended hash: an unknown name takes as long as a
# wrong password.
_OF_NOBODY = "$argon2id$v=19$m=65536,t=3,p=4$/ZneaDG7L+z8Au27Ls8xQA$ggyZaCDKW1xbor3jVLYNLao2rgfyjwIhaonwpGP4psc"


def why_not(password: str) -> str | None:
    """Why this may not be a password; None: it may."""
    if not SHORTEST <= len(password) <= LONGEST:
        return f"the password has {len(password)} characters; {SHORTEST} to {LONGEST} are allowed"
    return None


class Passwords:
    def __init__(self) -> None:
        self._hasher = PasswordHash.recommended()
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="perfagent-passwords")
        self._waiting = 0

    def hash(self, password: str) -> str:
        """Takes a tenth of a second or more."""
        return self._hasher.hash(password)

    def check(self, password: str, hashed: str | None) -> bool:
        """Whether it is the one; takes a tenth of a second or more, as long where there is none (hashed is None)."""
        if len(password) > LONGEST:  # nobody's
            password, hashed = "", None
        same = self._hasher.verify(password, hashed or _OF_NOBODY)
        return same and hashed is not None

    async def check_soon(self, password: str, hashed: str | None) -> bool:
        """As check(), on a thread of its own. Raises RefusalError while too many wait."""
        if self._waiting >= _WAITING:
            raise RefusalError("too_many_failures", "too many people log in at once; try again in 5 s", retry_after_s=5)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self.check, password, hashed)
        finally:
            self._waiting -= 1
