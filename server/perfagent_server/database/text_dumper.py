"""Texts on their way to PostgreSQL."""

from __future__ import annotations

from psycopg.types.string import StrDumper

__all__ = ["WithoutNul"]


class WithoutNul(StrDumper):
    """Writes a NUL as U+FFFD. The API refuses requests with a NUL; one that a script or an exception sends must not cost its
    frame."""

    def dump(self, obj: str) -> bytes | None:
        return super().dump(obj.replace("\x00", "\ufffd"))  # type: ignore[return-value]
