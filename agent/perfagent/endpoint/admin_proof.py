"""Proves that a command knows the admin token of this machine's server, and never sends the token itself.

Each request carries its own proof: an HMAC, keyed with the token. It covers the request's method and target, the time, a
random number, and the contents of the server's address file. A program that intercepts a proof cannot compute the token
from it. It cannot use the proof again either: not for another request, not at another server, not a second time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import Any

__all__ = ["AdminProof", "digest"]


class AdminProof:
    """Makes the proofs. announced: reads what the address file of the server says, which is another text after each
    start of the server."""

    def __init__(self, token: str, announced: Callable[[], str]) -> None:
        self._token, self._announced = token, announced

    def header(self, method: str, target: str) -> str:
        """The Authorization header of one request. target: path and query as they are sent."""
        made = f"{int(1000 * time.time())}.{secrets.token_urlsafe(16)}"
        return f"Bearer {made}.{digest(self._token, self._announced(), method, target, made)}"

    def sign(self, request: Any) -> Any:
        """For `auth` of httpx. A server sees no difference between an empty query and none."""
        path, _, query = request.url.raw_path.decode("ascii").partition("?")
        request.headers["Authorization"] = self.header(request.method, f"{path}?{query}" if query else path)
        return request


def digest(token: str, *parts: str) -> str:
    """parts: address file, method, target, and what else the proof says."""
    return hmac.new(token.encode(), "\n".join(parts).encode("utf-8", "replace"), hashlib.sha256).hexdigest()
