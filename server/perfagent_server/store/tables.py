"""Every table, as SQLAlchemy Core metadata: one schema for SQLite and PostgreSQL. migrations/ must say the same.

Times are Unix seconds (float64). Blobs that hold samples are described in blocks.py and rollups.py. A frame's path
through the tables: ledger (was it here before?) and tail (the frame as it came) in one transaction with the run's,
source's and series' last values; later the compactor turns tail rows that the rules have judged into blocks (those of
many series that have room yet: bundles) and rollups.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects import sqlite

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite fills an INTEGER PRIMARY KEY by itself, a BIGINT one it does not.
RowId = BigInteger().with_variant(sqlite.INTEGER(), "sqlite")


def _where(condition: str) -> dict[str, Any]:
    """Of an index for some rows only."""
    return {"sqlite_where": text(condition), "postgresql_where": text(condition)}


# --- runs: who sends --------------------------------------------------------------------------------------------------

run = Table(
    "run",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("project", String(256), nullable=False),
    Column("name", String(256), nullable=False),
    Column("state", String(16), nullable=False),  # perfagent.wire.STATES
    Column("reason", Text, nullable=False, default=""),  # why it ended, in words
    Column("step", BigInteger, nullable=False, default=0),  # last completed step
    Column("started", Float(53), nullable=False),
    Column("updated", Float(53), nullable=False),  # server clock of the last frame
    Column("ended", Float(53)),
    Column("attempt", BigInteger, nullable=False, default=0),  # the newest one
    Column("attempts", Integer, nullable=False, default=1),
    Column("world_size", Integer, nullable=False, default=1),
    Column("group_name", String(256)),
    Column("host", String(256)),
    Column("tags", Text, nullable=False, default="[]"),  # JSON list
    Column("notes", Text, nullable=False, default=""),  # written by people
    Column("config", Text, nullable=False, default="{}"),  # JSON object: the user's hyperparameters
    Column("meta", Text, nullable=False, default="{}"),  # JSON object: what the agent found out about the run
    Column("rules_off", Text, nullable=False, server_default="[]"),  # JSON: rules that do not judge it
    # JSON object: "names" of metrics and "tags" for which there was no room, each with count (at least) and limit
    Column("left_out", Text, nullable=False, server_default="{}"),
    Column("outcome", String(16)),  # of perfagent.wire.OUTCOMES, once it ended and was judged to its end
    Index(None, "project", "started"),
    Index(None, "name"),
    Index(None, "started"),
    Index("ix_run_unsettled", "ended", **_where("ended IS NOT NULL AND outcome IS NULL")),
)

attempt = Table(
    "attempt",
    metadata,
    Column("run", String(128), ForeignKey("run.id", ondelete="CASCADE"), primary_key=True),
    Column("attempt", BigInteger, primary_key=True),
    # older attempts are cut from view at and after this step
    Column("start_step", BigInteger, nullable=False, default=0),
    Column("started", Float(53), nullable=False),
)

source = Table(
    "source",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("run", String(128), ForeignKey("run.id", ondelete="CASCADE"), nullable=False),
    Column("attempt", BigInteger, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False, default=""),
    Column("step", BigInteger, nullable=False, default=0),
    Column("host", String(256)),
    Column("pid", Integer),
    Column("started", Float(53), nullable=False),
    Column("contact", Float(53), nullable=False),  # server clock of the last sign of life, or of its end
    Column("ended", Float(53)),
    Column("clock_offset_s", Float(53)),  # agent's wall clock minus ours when the first frame came
    # it sent its state: an agent, whose silence means something
    Column("heartbeat", Boolean, nullable=False, default=False),
    Column("worked_until", Float(53)),  # the newest time in its frames, by our clock
    Column("gpus", Integer, nullable=False, default=0, server_default="0"),
    Column("cpu_cores", Float(53)),  # that the processes of its host may use
    Column("gpu_energy_j", Float(53)),  # since it began
    Column("gpu_energy_per_step_j", Float(53)),  # newest
    # all frames up to this are here; the ledger has the rest
    Column("seq_floor", BigInteger, nullable=False, default=0),
    Index(None, "run", "attempt"),
    Index(None, "state"),
)

data_import = Table(
    "data_import",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("project", String(256), nullable=False),
    Column("created", Float(53), nullable=False),
    Column("who", String(128), nullable=False, default=""),
    Column("origin", Text, nullable=False),  # the machine and its files, as its user named them
)

imported_run = Table(
    "imported_run",
    metadata,
    Column("run", String(128), ForeignKey("run.id", ondelete="CASCADE"), primary_key=True),
    Column("import_id", String(64), nullable=False),  # data_import.id, of the import that began it
    Column("source", String(64), nullable=False),  # that its first frame came from
    Column("seq", BigInteger, nullable=False),  # of its newest frame
    Column("taken", Text, nullable=False),  # JSON: how many samples of each series are here
    Index(None, "import_id"),
)

# --- samples ----------------------------------------------------------------------------------------------------------

ledger = Table(
    "ledger",
    metadata,
    Column("source", String(64), primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    sqlite_with_rowid=False,
)

series = Table(
    "series",
    metadata,
    Column("id", RowId, primary_key=True, autoincrement=True),
    Column("run", String(128), ForeignKey("run.id", ondelete="CASCADE"), nullable=False),
    Column("rank", Integer, nullable=False),
    Column("name", String(256), nullable=False),
    UniqueConstraint("run", "rank", "name"),
)

tail = Table(
    "tail",
    metadata,
    Column("id", RowId, primary_key=True, autoincrement=True),  # the cursor of everything that reads behind the ack
    Column("run", String(128), ForeignKey("run.id", ondelete="CASCADE"), nullable=False),
    Column("attempt", BigInteger, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("source", String(64), nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("samples", Integer, nullable=False),
    Column("received", Float(53), nullable=False),
    Column("frame", LargeBinary, nullable=False),  # groups and events, MessagePack, as they came
    Index(None, "run", "rank"),
    sqlite_autoincrement=True,
)

block = Table(
    "block",
    metadata,
    Column("series", BigInteger, ForeignKey("series.id", ondelete="CASCADE"), primary_key=True),
    Column("attempt", BigInteger, primary_key=True),
    Column("block", BigInteger, primary_key=True),  # step // 1024
    Column("samples", Integer, nullable=False),
    Column("first_step", BigInteger, nullable=False),
    Column("last_step", BigInteger, nullable=False),
    Column("nonfinite", Integer, nullable=False),
    Column("min", Float(53)),  # over finite values; None where there is none
    Column("max", Float(53)),
    Column("sum", Float(53), nullable=False),
    Column("first_time", Float(53), nullable=False),
    Column("last_time", Float(53), nullable=False),
    Column("cells", LargeBinary, nullable=False),  # 64 cells of 16 steps
    Column("axis", BigInteger),  # the steps and times of its samples: axis.key
    Column("payload", LargeBinary),  # the values; None when retention dropped full resolution
    # With rowids: rows of 2 to 5 kB would spill out of the small cells that SQLite allows in an index.
    Index(None, "axis"),
    Index("ix_block_last_time", "last_time", **_where("payload IS NOT NULL")),  # what retention may thin
)

axis = Table(
    "axis",
    metadata,
    Column("key", RowId, primary_key=True, autoincrement=False),  # from its content and place: blocks.py
    # one of those that share it
    Column("series", BigInteger, ForeignKey("series.id", ondelete="CASCADE"), nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Index(None, "series"),
)

bundle = Table(
    "bundle",
    metadata,
    Column("id", RowId, primary_key=True, autoincrement=True),
    Column("run", String(128), ForeignKey("run.id", ondelete="CASCADE"), nullable=False),
    Column("rank", Integer, nullable=False),
    Column("attempt", BigInteger, nullable=False),
    Column("block", BigInteger, nullable=False),  # step // 1024
    Column("owner", BigInteger, nullable=False),  # one of the series: that of all bundles that were made of one group
    Column("low", BigInteger, nullable=False),  # lowest and highest id of its series
    Column("high", BigInteger, nullable=False),
    Column("samples", Integer, nullable=False),  # of all its series
    Column("last_time", Float(53), nullable=False),
    Column("members", LargeBinary, nullable=False),  # ids of its series; see bundles.py
    Column("axis", LargeBinary, nullable=False),  # steps and times
    Column("newest", LargeBinary, nullable=False),  # values of the last row
    Column("payload", LargeBinary, nullable=False),  # values of the rows before
    Index(None, "run", "rank", "attempt"),
    Index(None, "last_time"),
    sqlite_autoincrement=True,
)

rollup = Table(
    "rollup",
    metadata,
    Column("series", BigInteger, ForeignKey("series.id", ondelete="CASCADE"), primary_key=True),
    Column("attempt", BigInteger, primary_key=True),
    Column("level", Integer, primary_key=True),  # steps per cell: 256, 4096
    Column("chunk", BigInteger, primary_key=True),  # step // (level * 256)
    Column("cells", LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)

last = Table(
    "last",
    metadata,
    Column("series", BigInteger, ForeignKey("series.id", ondelete="CASCADE"), primary_key=True),
    Column("attempt", BigInteger, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("time", Float(53), nullable=False),
    # Eight little-endian bytes: SQLite stores a NaN in a REAL column as NULL.
    Column("value", LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)

# Of samples in ClickHouse (clickhouse/marks.py): empty where they are in blocks.

sample_extent = Table(
    "sample_extent",
    metadata,
    Column("series", BigInteger, ForeignKey("series.id", ondelete="CASCADE"), primary_key=True),
    Column("attempt", BigInteger, primary_key=True),
    Column("first_step", BigInteger, nullable=False),
    Column("last_step", BigInteger, nullable=False),
    Column("samples", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

sample_rollup = Table(
    "sample_rollup",
    metadata,
    Column("run", String(128), ForeignKey("run.id", ondelete="CASCADE"), primary_key=True),
    Column("attempt", BigInteger, primary_key=True),
    Column("step", BigInteger, nullable=False),  # of the steps before, there are cells
    Column("batch", BigInteger, nullable=False),  # of what came up to it
    Column("generations", LargeBinary, nullable=False),  # MessagePack list: of the cells that count
    Column("thinned", BigInteger, nullable=False, default=0, server_default="0"),  # before: cells only
    Column("thinned_at", Float(53)),  # Unix seconds; None when the samples are gone from ClickHouse, too
    # The newest batch with samples of steps before `step`. If it is above `batch`, these samples are not in cells yet. Rows
    # of an older version get the default, because they may have such samples.
    Column("late", BigInteger, nullable=False, server_default=str(2**63 - 1)),
    sqlite_with_rowid=False,
)

sample_deletion = Table(
    "sample_deletion",
    metadata,
    Column("id", RowId, primary_key=True, autoincrement=True),
    Column("run", String(128), nullable=False),  # that is gone
    Column("batch", BigInteger, nullable=False),  # what it had up to this one is to be removed
    Index(None, "run"),
    sqlite_autoincrement=True,
)

MAY_GO_BY_AGE = "kind NOT IN ('state', 'context', 'gpu')"
"""Of events: the others stay as long as their run. As SQL: SQLite takes the index of it only for the same words."""

event = Table(
    "event",
    metadata,
    Column("id", RowId, primary_key=True, autoincrement=True),
    Column("run", String(128), ForeignKey("run.id", ondelete="CASCADE"), nullable=False),
    Column("attempt", BigInteger, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("source", String(64), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("step", BigInteger),
    Column("time", Float(53), nullable=False),
    Column("data", LargeBinary, nullable=False),  # MessagePack object
    Index(None, "run", "kind"),
    Index("ix_event_time", "time", **_where(MAY_GO_BY_AGE)),
)

# --- how long it is kept ----------------------------------------------------------------------------------------------

retention_setting = Table(
    "retention_setting",
    metadata,
    Column("project", String(256), primary_key=True),  # "" is all projects
    Column("settings", Text, nullable=False),  # JSON: fields of RetentionPolicy
)

run_storage = Table(
    "run_storage",
    metadata,
    Column("run", String(128), ForeignKey("run.id", ondelete="CASCADE"), primary_key=True),
    # steps of the finest cells that are left: 1 (samples), 16, 256, 4096
    Column("finest_steps", Integer, nullable=False, default=1, server_default="1"),
    Column("thinned", Float(53), nullable=False, default=0.0, server_default="0"),  # when, by the server's clock
    # bytes, and when they were counted
    Column("measured", Float(53), nullable=False, default=0.0, server_default="0"),
    Column("samples_bytes", BigInteger, nullable=False, default=0, server_default="0"),
    Column("cells_bytes", BigInteger, nullable=False, default=0, server_default="0"),  # of blocks: 16 steps
    Column("rollups_bytes", BigInteger, nullable=False, default=0, server_default="0"),  # of 256 and 4096 steps
    Column("other_bytes", BigInteger, nullable=False, default=0, server_default="0"),  # tail, events, profiles
)

# --- what a run is asked for, and what it sends back ------------------------------------------------------------------

command = Table(
    "command",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("run", String(128), ForeignKey("run.id", ondelete="CASCADE"), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("params", Text, nullable=False, default="{}"),  # JSON object
    Column("ranks", Text),  # JSON list; None for all
    Column("who", String(128), nullable=False),
    Column("why", Text, nullable=False, default=""),
    Column("created", Float(53), nullable=False),
    Column("expires", Float(53), nullable=False),  # handed to nobody from then on
    # for which it was sent, and its rule; empty: a person asked
    Column("alert", String(64), nullable=False, default="", server_default=""),
    Column("rule", String(64), nullable=False, default="", server_default=""),
    Index(None, "run", "created"),
)

command_source = Table(
    "command_source",
    metadata,
    Column("command", String(32), ForeignKey("command.id", ondelete="CASCADE"), primary_key=True),
    Column("source", String(64), primary_key=True),
    Column("rank", Integer, nullable=False),
    Column("seq", BigInteger, nullable=False),  # of the frame in whose answer it went out: the same frame gets it again
    Column("handed", Float(53), nullable=False),
    Column("state", String(16), nullable=False),  # handed, accepted, done, refused
    Column("message", Text, nullable=False, default=""),
    Column("answered", Float(53)),
    sqlite_with_rowid=False,
)

profile = Table(
    "profile",
    metadata,
    Column("run", String(128), ForeignKey("run.id", ondelete="CASCADE"), primary_key=True),
    Column("id", String(64), primary_key=True),
    Column("attempt", BigInteger, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("step", BigInteger),
    Column("time", Float(53), nullable=False),
    Column("parts", Integer, nullable=False),  # pieces of the trace; 0 without one
    Column("summary", LargeBinary, nullable=False),  # MessagePack object: operators, gaps, sizes
    Index(None, "run", "time"),
)

profile_part = Table(
    "profile_part",
    metadata,
    Column("run", String(128), ForeignKey("run.id", ondelete="CASCADE"), primary_key=True),
    Column("profile", String(64), primary_key=True),
    Column("part", Integer, primary_key=True),
    Column("data", LargeBinary, nullable=False),  # of the gzip file
)

media = Table(
    "media",
    metadata,
    # never given twice: browsers keep what they have under it
    Column("id", RowId, primary_key=True, autoincrement=True),
    Column("run", String(128), ForeignKey("run.id", ondelete="CASCADE"), nullable=False),
    Column("attempt", BigInteger, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("name", String(256), nullable=False),
    Column("kind", String(16), nullable=False),  # image, audio, table, histogram
    Column("step", BigInteger, nullable=False),
    Column("place", Integer, nullable=False),  # among those of the same name and step
    Column("time", Float(53), nullable=False),
    Column("type", String(32), nullable=False),  # of the bytes
    Column("bytes", Integer, nullable=False),
    Column("caption", Text, nullable=False),
    Column("width", Integer),
    Column("height", Integer),
    Column("data", LargeBinary, nullable=False),  # the last: who reads the others need not pass it
    Index(None, "run", "name", "kind", "step", "bytes"),
    Index(None, "time"),
    sqlite_autoincrement=True,
)

# --- rules and alerts -------------------------------------------------------------------------------------------------

cursor = Table(
    "cursor",
    metadata,
    # "rules/<shard>": tail rows of the shard's runs have been judged up to this id
    Column("name", String(32), primary_key=True),
    Column("tail_id", BigInteger, nullable=False),
    Column("extra", LargeBinary),
)

rule_state = Table(
    "rule_state",
    metadata,
    Column("run", String(128), ForeignKey("run.id", ondelete="CASCADE"), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("state", LargeBinary, nullable=False),  # MessagePack: windows and alert machines of the run
)
SET_ASIDE = -1
"""The version of a row that is no snapshot: of a run that the rules cannot judge for now (engine/set_aside.py)."""

rule_setting = Table(
    "rule_setting",
    metadata,
    Column("project", String(256), primary_key=True),  # "" is all projects
    Column("rule", String(64), primary_key=True),
    Column("settings", Text, nullable=False),  # JSON: thresholds by name, and `enabled`
)

own_alert = Table(
    "own_alert",
    metadata,
    Column("project", String(256), primary_key=True),  # "" is all projects
    Column("name", String(64), primary_key=True),
    Column("form", Text, nullable=False),  # JSON: rules/own_alert.py
)

panel = Table(
    "panel",
    metadata,
    Column("project", String(256), primary_key=True),
    Column("id", String(64), primary_key=True),
    Column("title", String(128), nullable=False),
    Column("lines", Text, nullable=False),  # JSON list: runs/expressions.py
    Column("who", String(256), nullable=False, default="", server_default=""),
    Column("created", Float(53), nullable=False),
)

annotation = Table(
    "annotation",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("run", String(128), ForeignKey("run.id", ondelete="CASCADE"), nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("text", Text, nullable=False),
    Column("who", String(256), nullable=False, default="", server_default=""),
    Column("created", Float(53), nullable=False),
    Index(None, "run", "step"),
)

saved_view = Table(
    "saved_view",
    metadata,
    Column("project", String(256), primary_key=True),  # "" is all projects
    Column("name", String(64), primary_key=True),
    Column("page", String(16), nullable=False),
    Column("query", Text, nullable=False),  # of the address, without the question mark
    Column("who", String(256), nullable=False),
    Column("changed", Float(53), nullable=False),
)

alert = Table(
    "alert",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("run", String(128), ForeignKey("run.id", ondelete="CASCADE"), nullable=False),
    Column("rule", String(64), nullable=False),
    Column("severity", String(16), nullable=False),
    Column("state", String(16), nullable=False),  # pending, firing, resolved
    Column("message", Text, nullable=False),
    Column("fix", Text, nullable=False, default=""),
    Column("title", Text, nullable=False, default="", server_default=""),
    Column("cause", Text, nullable=False, default="", server_default=""),
    Column("cost", Text, nullable=False, default="", server_default=""),
    Column("evidence", Text, nullable=False, default="{}"),  # JSON
    Column("ranks", Text, nullable=False, default="[]"),  # JSON
    Column("gain_pct", Float(53)),
    Column("since", Float(53), nullable=False),
    Column("since_step", BigInteger),
    Column("last_step", BigInteger),
    Column("fired", Float(53)),
    Column("resolved", Float(53)),
    Column("acknowledged", Float(53)),
    Column("acknowledged_by", String(256), nullable=False, default="", server_default=""),
    Column("note", Text, nullable=False, default="", server_default=""),  # of who acknowledged it
    Column("muted_until", Float(53)),  # the rule in this run:
    Column("muted_rule", String(64), nullable=False, default="", server_default=""),  # the alert may become another's
    Column("snoozed_until", Float(53)),  # this alert only
    Index(None, "run", "state"),
    Index(None, "state", "since"),
)

price = Table(
    "price",
    metadata,
    Column("project", String(256), primary_key=True),  # empty: every project without one
    Column("gpu_hour", Float(53)),
    Column("cpu_core_hour", Float(53)),
    Column("kwh", Float(53)),
    Column("currency", String(16), nullable=False),
)

alert_history = Table(
    "alert_history",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("alert", String(64), ForeignKey("alert.id", ondelete="CASCADE"), nullable=False),
    Column("time", Float(53), nullable=False),
    Column("event", String(32), nullable=False),  # alerts/history.py: EVENTS
    Column("who", String(256), nullable=False, default=""),  # empty: a rule
    Column("note", Text, nullable=False, default=""),
    Index(None, "alert", "time"),
)

silence = Table(
    "silence",
    metadata,
    Column("id", String(64), primary_key=True),
    # what it matches, empty: any
    Column("project", String(256), nullable=False, default=""),
    Column("tag", String(256), nullable=False, default=""),
    Column("run", String(256), nullable=False, default=""),  # id or name
    Column("rule", String(64), nullable=False, default=""),
    Column("starts", Float(53), nullable=False),
    Column("ends", Float(53), nullable=False),
    Column("repeats", String(16), nullable=False, default=""),  # "", daily, weekly
    Column("note", Text, nullable=False, default=""),
    Column("who", String(256), nullable=False, default=""),
    Column("created", Float(53), nullable=False),
)

channel = Table(
    "channel",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("name", String(256), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("url", Text, nullable=False),
    Column("secret", Text, nullable=False),
    Column("min_severity", String(16), nullable=False, default="warning"),
    Column("projects", Text, nullable=False, default="[]", server_default="[]"),  # JSON list; empty: any
    Column(
        "tags", Text, nullable=False, default="[]", server_default="[]"
    ),  # JSON list: of which a run has one; empty: any
    Column("group_s", Float(53), nullable=False, default=0.0, server_default="0"),  # between two messages on a run
    Column("repeat_s", Float(53), nullable=False, default=0.0, server_default="0"),  # 0: never told again
    Column("summaries", Boolean, nullable=False, default=False, server_default="0"),  # at a run's end
    Column("every_s", Float(53), nullable=False, default=0.0, server_default="0"),  # between digests, or heartbeats
    Column("language", String(8), nullable=False, default="en", server_default="en"),  # of its messages
    Column("told", Float(53)),  # when the newest digest or heartbeat was sent
    Column("old_secret_until", Float(53)),  # both secrets sign until then
    Column("enabled", Boolean, nullable=False, default=True),
    Column("disabled_reason", Text, nullable=False, default=""),
    Column("created", Float(53), nullable=False),
    Column("failing_since", Float(53)),
)

delivery = Table(
    "delivery",
    metadata,
    # webhook-id on every try: the same event on the same channel is one delivery
    Column("id", String(96), primary_key=True),
    Column("channel", String(64), ForeignKey("channel.id", ondelete="CASCADE"), nullable=False),
    Column("alert", String(64), ForeignKey("alert.id", ondelete="CASCADE")),
    Column("event", String(32), nullable=False),  # alert.firing, alert.resolved, channel.test ...
    Column("run", String(128)),
    Column("urgent", Boolean, nullable=False, default=False, server_default="0"),  # never waits for others of its run
    Column("body", LargeBinary, nullable=False),
    Column("state", String(16), nullable=False),  # waiting, delivered, failed
    Column("tries", Integer, nullable=False, default=0),
    Column("created", Float(53), nullable=False),
    Column("due", Float(53), nullable=False),  # 0: at once
    # before that it is not sent, whatever is muted or not; `due` is later while it is; 0: it waits for no other reason
    Column("ready", Float(53), nullable=False, default=0.0, server_default="0"),
    Column("delivered", Float(53)),
    Column("status", Integer),  # of the last answer
    Column("error", Text, nullable=False, default=""),
    Index(None, "state", "due"),
    Index(None, "alert"),
)

# --- several servers on one database -----------------------------------------------------------------------------------

server = Table(
    "server",
    metadata,
    Column("id", String(32), primary_key=True),  # of one process
    Column("address", Text, nullable=False),
    Column("version", String(32), nullable=False),
    Column("started", Float(53), nullable=False),
    Column("seen", Float(53), nullable=False),  # by the clock of the database, like all times of these tables
    Column("secrets", String(32), nullable=False),  # a digest: all must have the same
    Column("watching", Text, nullable=False, default="[]", server_default="[]"),  # JSON: runs that its pages show
)

lease = Table(
    "lease",
    metadata,
    Column("name", String(32), primary_key=True),  # a shard, or what one server does for all
    Column("server", String(32), nullable=False),  # empty: given back
    Column("term", BigInteger, nullable=False),  # one more with each holder
    Column("expires", Float(53), nullable=False),
)

change = Table(
    "change",
    metadata,
    Column("id", RowId, primary_key=True, autoincrement=True),
    Column("server", String(32), nullable=False),  # that made it
    Column("kind", String(16), nullable=False),  # store/changes.py
    Column("subject", Text, nullable=False),
    Column("detail", Text, nullable=False, default="", server_default=""),
    Column("created", Float(53), nullable=False),
    Index(None, "kind", "id"),
    sqlite_autoincrement=True,
)

# --- who may do what --------------------------------------------------------------------------------------------------

api_key = Table(
    "api_key",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("scope", String(16), nullable=False),  # ingest, read, operate, admin
    Column("digest", LargeBinary, nullable=False),  # HMAC-SHA256 with the server's pepper
    Column("name", String(256), nullable=False, default=""),
    Column("project", String(256)),
    Column("created", Float(53), nullable=False),
    Column("expires", Float(53)),
    Column("revoked", Float(53)),
    Column("used", Float(53)),
    Column("limits", Text),  # JSON: its own, by name; null for the server's
)

session = Table(
    "session",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("scope", String(16), nullable=False),
    Column("created", Float(53), nullable=False),
    Column("expires", Float(53), nullable=False),
    # api_key.id of the key that opened it, with which it ends; None: the admin token or its link, or a user
    Column("key", String(16)),
    Column("account", String(32)),  # account.id of who is logged in
    Column("epoch", Integer, nullable=False, default=0, server_default="0"),  # of the account when it was opened
    Column("origin", String(128), nullable=False, default="", server_default=""),  # address
    Column("agent", String(256), nullable=False, default="", server_default=""),  # the browser's User-Agent
    Index(None, "account"),
)

login_link = Table(
    "login_link",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("scope", String(16), nullable=False),
    Column("expires", Float(53), nullable=False),
)

account = Table(
    "account",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("name", String(256), nullable=False),
    Column("folded", String(256), nullable=False, unique=True),  # the name without its case
    Column("password", Text),  # argon2; None: signs in at the identity provider only
    # of an identity provider: its issuer, and its id of the user
    Column("issuer", String(512)),
    Column("subject", String(256)),
    Column("epoch", Integer, nullable=False, default=0),  # a session of an older one is over
    Column("created", Float(53), nullable=False),
    Column("disabled", Float(53)),
    Column("used", Float(53)),  # the last login
    UniqueConstraint("issuer", "subject"),
)

account_role = Table(
    "account_role",
    metadata,
    Column("account", String(32), ForeignKey("account.id", ondelete="CASCADE"), primary_key=True),
    Column("project", String(256), primary_key=True),  # "" is all projects
    Column("role", String(16), nullable=False),  # viewer, operator, admin
)

login_failure = Table(
    "login_failure",
    metadata,
    Column("bucket", String(64), primary_key=True),  # digest of an address, or of a name
    Column("failures", Integer, nullable=False),
    Column("last", Float(53), nullable=False),
    Column("blocked_until", Float(53), nullable=False),
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("key", String(256), primary_key=True),
    Column("created", Float(53), nullable=False),
    Column("reply", LargeBinary, nullable=False),
)

audit = Table(
    "audit",
    metadata,
    Column("id", RowId, primary_key=True, autoincrement=True),
    Column("time", Float(53), nullable=False),
    Column("who", String(128), nullable=False),
    Column("origin", String(128), nullable=False, default=""),
    Column("action", String(64), nullable=False),
    Column("thing", String(256), nullable=False, default="", server_default=""),  # id of the run, alert, key ...
    Column(
        "project", String(256), nullable=False, default="", server_default=""
    ),  # whose thing it is; "": the server's
    Column("detail", Text, nullable=False, default=""),
)
