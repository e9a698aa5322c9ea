"""Opens the metric store: everything in the database, or compacted samples in ClickHouse. A database says where its samples
are: it cannot be opened without them."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

from sqlalchemy import Connection, select

from perfagent.errors import ConfigError
from perfagent.wire.limits import MAX_NAMES_PER_RUN
from perfagent_server.database import Database
from perfagent_server.store.clickhouse.compaction import ClickHouseCompactor
from perfagent_server.store.clickhouse.connection import Address, Away, ClickHouse
from perfagent_server.store.clickhouse.marks import batches_of
from perfagent_server.store.clickhouse.reading import ClickHouseSamples
from perfagent_server.store.clickhouse.schema import ensure_schema
from perfagent_server.store.interface import Check
from perfagent_server.store.retention.policy import Scope
from perfagent_server.store.samples import SampleCompactor
from perfagent_server.store.shards import StoreLeases
from perfagent_server.store.sql import SqlStore
from perfagent_server.store.tables import block, bundle
from perfagent_server.store.write.compaction import Compactor

__all__ = ["open_clickhouse", "open_store"]

_log = logging.getLogger(__name__)

Thin = Callable[[Scope, float, Check], int]


def open_store(
    database: Database,
    metrics: str | None,
    *,
    max_names: int = MAX_NAMES_PER_RUN,
    rules_enabled: bool = True,
    leases: StoreLeases | None = None,
    clock: Callable[[], float] = time.time,
) -> tuple[SqlStore, SampleCompactor, Thin | None]:
    """The store, its compactor, and what thins samples that are not in the database. metrics: the address of ClickHouse;
    leases: of a server that shares the database; clock: the compactor's. Raises ConfigError where the samples of this
    database are elsewhere."""
    with database.read() as connection:
        where = batches_of(connection).address
        in_blocks = _has_blocks(connection)
    if metrics is None:
        if where:
            raise ConfigError(
                f"the samples of this database are in ClickHouse at {where}; name it with --metrics clickhouse://user:password@{where}"
            )
        store = SqlStore(database, max_names=max_names)
        return store, Compactor(database, rules_enabled=rules_enabled, shards=leases, clock=clock), None
    address = Address.parse(metrics)
    if in_blocks:
        raise ConfigError(
            "this database holds samples itself, and these cannot be taken to ClickHouse: name an empty database with "
            "--database (or another folder with --data), and keep this one for a server without --metrics"
        )
    if where and where.partition("/")[2] != address.database:  # the host may have moved, or have several names
        raise ConfigError(f"the samples of this database are in ClickHouse at {where}, not in {address.database}")
    clickhouse = open_clickhouse(address)
    compactor = ClickHouseCompactor(database, clickhouse, rules_enabled=rules_enabled, leases=leases, clock=clock)
    store = SqlStore(database, max_names=max_names, snapshot=functools.partial(ClickHouseSamples, clickhouse))
    return store, compactor, compactor.thin


def open_clickhouse(address: Address) -> ClickHouse:
    """With its tables, unless it is away, in which case the compactor makes them later. Raises ConfigError for an address
    that is answered but cannot be used."""
    clickhouse = ClickHouse(address)
    try:
        ensure_schema(clickhouse)
    except Away as error:
        _log.warning("%s", error)
    except Exception as error:
        from clickhouse_connect.driver.exceptions import ClickHouseError

        if not isinstance(error, ClickHouseError):
            raise
        raise ConfigError(f"ClickHouse at {address} refused: {str(error).splitlines()[0][:300]}") from error
    return clickhouse


def _has_blocks(connection: Connection) -> bool:
    return any(connection.execute(select(table).limit(1)).first() is not None for table in (block, bundle))
