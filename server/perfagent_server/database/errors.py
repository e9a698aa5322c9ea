"""Why a write or a reading is not possible now."""

from __future__ import annotations

from perfagent.errors import PerfagentError

__all__ = ["QueueFull", "StorageError", "StorageFull", "Unreachable", "Unsure"]


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
