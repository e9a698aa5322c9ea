"""The database: SQLite in one file, or PostgreSQL; a pool for reading, and one thread that writes."""

from perfagent_server.database.errors import QueueFull, StorageError, StorageFull, Unreachable, Unsure
from perfagent_server.database.opening import (
    DatabaseSettings,
    database_url,
    is_sqlite,
    open_database,
    open_to_read,
    revision_of,
    sqlite_path,
)
from perfagent_server.database.writer import Database

__all__ = [
    "Database",
    "DatabaseSettings",
    "QueueFull",
    "StorageError",
    "StorageFull",
    "Unreachable",
    "Unsure",
    "database_url",
    "is_sqlite",
    "open_database",
    "open_to_read",
    "revision_of",
    "sqlite_path",
]
