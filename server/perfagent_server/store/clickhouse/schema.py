"""The tables in ClickHouse and their versions.

`sample` has a row a sample, in the order in which a series is read. Which rows count is not said here but in SQL
(marks.py). `cell` has the summaries of 16, 256 and 4096 steps of what is no longer changed much. Both engines put rows with
the same key together when they merge: keys are unique, so that only an INSERT that ran twice is undone by it.
"""

from __future__ import annotations

from perfagent.errors import ResourceError
from perfagent_server.store.clickhouse.connection import ClickHouse

__all__ = ["VERSION", "cell", "ensure_schema", "sample", "statements"]

_CREATE = (
    # bits: of the float64 value. As whole numbers they are stored bit by bit, NaN payloads too, and T64 puts bits of equal
    # weight together: a float32 among them takes no more than its own four bytes.
    """CREATE TABLE IF NOT EXISTS {database}.sample{cluster} (
        run LowCardinality(String), name LowCardinality(String), rank Int32 CODEC(ZSTD(1)), attempt Int64 CODEC(ZSTD(1)),
        step Int64 CODEC(DoubleDelta, ZSTD(1)), batch UInt64 CODEC(Delta, ZSTD(1)), row UInt32 CODEC(Delta, ZSTD(1)),
        time Float64 CODEC(Delta, ZSTD(1)), bits UInt64 CODEC(T64('bit'), ZSTD(1)),
        value Float64 ALIAS reinterpretAsFloat64(bits),
        INDEX batches batch TYPE minmax GRANULARITY 1
    ) ENGINE = {engine} ORDER BY (run, name, rank, attempt, step, batch, row)
    SETTINGS {window} = 10000, index_granularity = 4096""",
    """CREATE TABLE IF NOT EXISTS {database}.cell{cluster} (
        run LowCardinality(String), name LowCardinality(String), level UInt16, rank Int32 CODEC(ZSTD(1)),
        attempt Int64 CODEC(ZSTD(1)), step Int64 CODEC(DoubleDelta, ZSTD(1)), generation UInt64 CODEC(Delta, ZSTD(1)),
        low UInt64 CODEC(T64('bit'), ZSTD(1)), high UInt64 CODEC(T64('bit'), ZSTD(1)),
        total Float64 CODEC(Gorilla, ZSTD(1)), count UInt64 CODEC(T64, ZSTD(1)), nonfinite UInt64 CODEC(T64, ZSTD(1)),
        time Float64 CODEC(Delta, ZSTD(1))
    ) ENGINE = {engine} ORDER BY (run, name, level, rank, attempt, step, generation)
    SETTINGS {window} = 10000, index_granularity = 4096""",
    """CREATE TABLE IF NOT EXISTS {database}.schema_version{cluster} (version UInt32) ENGINE = {engine} ORDER BY version""",
)

_UPGRADES: dict[int, tuple[str, ...]] = {1: _CREATE}
"""Version -> the statements that lead to it from the one before. Each may run twice."""
VERSION = max(_UPGRADES)


def sample(clickhouse: ClickHouse) -> str:
    return f"{clickhouse.address.database}.sample"


def cell(clickhouse: ClickHouse) -> str:
    return f"{clickhouse.address.database}.cell"


def statements(database: str, cluster: str | None, since: int = 0) -> list[str]:
    """What makes or upgrades the tables, on one node or on every node of a cluster."""
    words = {
        "database": database,
        "cluster": f" ON CLUSTER {cluster}" if cluster else "",
        "window": "replicated_deduplication_window" if cluster else "non_replicated_deduplication_window",
        "engine": "ReplicatedReplacingMergeTree('/clickhouse/tables/{uuid}/{shard}', '{replica}')"
        if cluster
        else "ReplacingMergeTree",
    }
    made = [f"CREATE DATABASE IF NOT EXISTS {database}{words['cluster']}"]
    for version in range(since + 1, VERSION + 1):
        made += [text.format(**words) for text in _UPGRADES[version]]
        made.append(f"INSERT INTO {database}.schema_version VALUES ({version})")
    return made


def ensure_schema(clickhouse: ClickHouse) -> None:
    """Makes the tables, or brings them to this version. Raises ResourceError where a newer perfagent has made them."""
    address = clickhouse.address
    here = clickhouse.run(
        "SELECT count() FROM system.tables WHERE database = {database:String} AND name = 'schema_version'",
        {"database": address.database},
    )
    version = int(clickhouse.run(f"SELECT max(version) FROM {address.database}.schema_version")) if int(here) else 0
    if version > VERSION:
        raise ResourceError(
            f"the tables in ClickHouse at {address} have version {version}; this perfagent knows {VERSION}: upgrade perfagent"
        )
    if version < VERSION:
        for statement in statements(address.database, address.cluster, version):
            clickhouse.run(statement)
