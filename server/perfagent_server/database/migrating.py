"""Brings a database to the schema of this version, with what went wrong in words."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DatabaseError, OperationalError

from perfagent.errors import ResourceError
from perfagent_server import schema

__all__ = ["upgrade"]


def upgrade(engine: Engine, where: str, *, cure: str, first: Callable[[Connection], None] | None = None) -> None:
    """cure: what to do about a database that is not ours. first: what to do in the transaction before anything else.
    Raises ResourceError."""
    try:
        schema.upgrade(engine, where, first)
    except OperationalError as error:
        retry = "check that it can be reached and written, then start again"
        raise ResourceError(f"the database {where} cannot be upgraded ({error.orig}): {retry}") from error
    except DatabaseError as error:
        raise ResourceError(f"the database {where} is damaged or not ours ({error.orig}): {cure}") from error
