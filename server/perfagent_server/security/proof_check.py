"""Checks an administrator's proof, which perfagent.endpoint.admin_proof makes."""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable

from perfagent.endpoint.admin_proof import digest

__all__ = ["ProofCheck"]

_VALID_S = 30.0


class ProofCheck:
    """clock: Unix seconds."""

    def __init__(self, token: str, announced: str, *, clock: Callable[[], float] = time.time) -> None:
        self._token, self._announced, self._clock = token, announced, clock
        self._used: dict[str, float] = {}
        self._lock = threading.Lock()

    def is_right(self, proof: str, method: str, target: str) -> bool:
        """Whether it was made with the token, for this request to this server; however long ago."""
        made, _, given = proof.rpartition(".")
        wanted = digest(self._token, self._announced, method, target, made)
        return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())

    def admits(self, proof: str, method: str, target: str) -> bool:
        """Whether it is right, was made just now and is used for the first time."""
        if not self.is_right(proof, method, target):
            return False
        now, at = self._clock(), int(proof.partition(".")[0]) / 1000
        with self._lock:
            self._used = {used: until for used, until in self._used.items() if until > now}
            fresh = abs(now - at) <= _VALID_S and proof not in self._used
            self._used[proof] = max(now, at) + 2 * _VALID_S
        return fresh
