"""Proves that a command knows the admin token of this machine's server, and never sends the token itself.

Each request carries its own proof: an HMAC, keyed with the token. It covers the request's method and target, the time, a
random number, and the contents of the server's address file. A program that intercepts a proof cannot compute the token
from it. It cannot use the proof again either: not for another request, not at another server, not a second time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["AdminProof", "ProofCheck"]

_VALID_S = 30.0


class AdminProof:
    """Makes the proofs. announced: reads what the address file of the server says, which is another text after each
    start of the server."""

    def __init__(self, token: str, announced: Callable[[], str]) -> None:
        self._token, self._announced = token, announced

    def header(self, method: str, target: str) -> str:
        """The Authorization header of one request. target: path and query as they are sent."""
        made = f"{int(1000 * time.time())}.{secrets.token_urlsafe(16)}"
        return f"Bearer {made}.{_digest(self._token, self._announced(), method, target, made)}"

    def sign(self, request: Any) -> Any:
        """For `auth` of httpx. A server sees no difference between an empty query and none."""
        path, _, query = request.url.raw_path.decode("ascii").partition("?")
        request.headers["Authorization"] = self.header(request.method, f"{path}?{query}" if query else path)
        return request


class ProofCheck:
    """The server's side. clock: Unix seconds."""

    def __init__(self, token: str, announced: str, *, clock: Callable[[], float] = time.time) -> None:
        self._token, self._announced, self._clock = token, announced, clock
        self._used: dict[str, float] = {}
        self._lock = threading.Lock()

    def is_right(self, proof: str, method: str, target: str) -> bool:
        """Whether it was made with the token, for this request to this server; however long ago."""
        made, _, digest = proof.rpartition(".")
        wanted = _digest(self._token, self._announced, method, target, made)
        return hmac.compare_digest(digest.encode("utf-8", "replace"), wanted.encode())

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


def _digest(token: str, *parts: str) -> str:
    return hmac.new(token.encode(), "\n".join(parts).encode("utf-8", "replace"), hashlib.sha256).hexdigest()
