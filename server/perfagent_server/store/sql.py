"""The metric store: MetricStore on the tables of tables.py, and on a sample store behind the tail (samples.py)."""

from __future__ import annotations

from perfagent.wire.limits import MAX_NAMES_PER_RUN
from perfagent_server.database import Database
from perfagent_server.store.read.queries import Answers, Snapshots
from perfagent_server.store.read.sql_samples import SqlSamples
from perfagent_server.store.write.append import Appender

__all__ = ["SqlStore"]


class SqlStore(Appender, Answers):
    """See MetricStore. snapshot: of where the compacted samples are; blocks in SQL unless it is given."""

    def __init__(
        self, database: Database, *, max_names: int = MAX_NAMES_PER_RUN, snapshot: Snapshots = SqlSamples
    ) -> None:
        Answers.__init__(self, database, snapshot)
        Appender.__init__(self, database, max_names=max_names)
