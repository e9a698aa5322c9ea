"""The metric store on SQL: MetricStore on the tables of tables.py."""

from __future__ import annotations

from perfagent.wire.limits import MAX_NAMES_PER_RUN
from perfagent_server.database import Database
from perfagent_server.store.read.queries import Answers
from perfagent_server.store.write.append import Appender

__all__ = ["SqlStore"]


class SqlStore(Appender, Answers):
    """See MetricStore."""

    def __init__(self, database: Database, *, max_names: int = MAX_NAMES_PER_RUN) -> None:
        Answers.__init__(self, database)
        Appender.__init__(self, database, max_names=max_names)
