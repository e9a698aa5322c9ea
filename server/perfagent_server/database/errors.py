"""Why a write or a reading is not possible: now, or ever."""

from __future__ import annotations

import sqlite3

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from perfagent.errors import PerfagentError

__all__ = ["QueueFull", "StorageError", "StorageFull", "Unreachable", "Unsure", "is_of_the_run", "spell"]

_SAID = 300  # characters of an error


class StorageError(PerfagentError):
    """The database cannot be used now: try the same again later. retry_after_s: when."""

    retry_after_s = 5.0


class StorageFull(StorageError):  # noqa: N818 - a state of the disk, and the name the routes know
    """There is no space left for new data."""

    retry_after_s = 30.0


class QueueFull(StorageError):  # noqa: N818 - as above
    """Too many writes wait already, or another program holds the database's lock."""


class Unreachable(StorageError):  # noqa: N818 - as above
    """The connection to the database was lost, or there is none."""


class Unsure(Unreachable):
    """The connection was lost during a commit: what was written may be stored, or not."""


def spell(error: BaseException) -> str:
    """An error, as people read it in one line."""
    return f"{type(error).__name__}: {error}"[:_SAID].replace("\x00", "").encode("utf-8", "replace").decode()


def is_of_the_run(error: Exception) -> bool:
    """Whether what a run caused could not be written for what it is, and never will be; and not for the database of this
    moment."""
    if isinstance(error, DBAPIError):
        return isinstance(error, (DataError, IntegrityError))
    return not isinstance(error, (StorageError, sqlite3.Error, OSError, MemoryError))
