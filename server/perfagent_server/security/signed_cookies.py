"""What the server leaves with a browser and believes again: signed with the server's pepper, one purpose each."""

from __future__ import annotations

from typing import Any

from itsdangerous import BadSignature, URLSafeTimedSerializer

__all__ = ["SignedCookies"]


class SignedCookies:
    def __init__(self, pepper: str) -> None:
        self._pepper = pepper

    def sign(self, purpose: str, value: Any) -> str:
        return str(self._of(purpose).dumps(value))

    def read(self, purpose: str, text: str | None, *, max_age_s: float) -> Any:
        """The value; None where it is missing, too old, of another purpose, or not of ours."""
        try:
            return self._of(purpose).loads(text, max_age=int(max_age_s)) if text else None
        except BadSignature:
            return None

    def _of(self, purpose: str) -> URLSafeTimedSerializer:
        return URLSafeTimedSerializer(self._pepper, salt=f"perfagent {purpose}")
