"""The first schema.

Until the first release this file is regenerated when tables.py changes; from then on every change is a file of its own.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

RowId = sa.BigInteger().with_variant(sa.INTEGER(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "api_key",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("scope", sa.String(length=16), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("project", sa.String(length=256), nullable=True),
        sa.Column("created", sa.Float(precision=53), nullable=False),
        sa.Column("expires", sa.Float(precision=53), nullable=True),
        sa.Column("revoked", sa.Float(precision=53), nullable=True),
        sa.Column("used", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_key")),
    )
    op.create_table(
        "audit",
        sa.Column("id", RowId, autoincrement=True, nullable=False),
        sa.Column("time", sa.Float(precision=53), nullable=False),
        sa.Column("who", sa.String(length=128), nullable=False),
        sa.Column("origin", sa.String(length=128), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_table(
        "channel",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("min_severity", sa.String(length=16), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("disabled_reason", sa.Text(), nullable=False),
        sa.Column("created", sa.Float(precision=53), nullable=False),
        sa.Column("failing_since", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_channel")),
    )
    op.create_table(
        "cursor",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("tail_id", sa.BigInteger(), nullable=False),
        sa.Column("extra", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_cursor")),
    )
    op.create_table(
        "idempotency",
        sa.Column("key", sa.String(length=256), nullable=False),
        sa.Column("created", sa.Float(precision=53), nullable=False),
        sa.Column("reply", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_idempotency")),
    )
    op.create_table(
        "ledger",
        sa.Column("source", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("source", "seq", name=op.f("pk_ledger")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "run",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("project", sa.String(length=256), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("started", sa.Float(precision=53), nullable=False),
        sa.Column("updated", sa.Float(precision=53), nullable=False),
        sa.Column("ended", sa.Float(precision=53), nullable=True),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("group_name", sa.String(length=256), nullable=True),
        sa.Column("host", sa.String(length=256), nullable=True),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("notes", sa.Text(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("meta", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run")),
    )
    op.create_index(op.f("ix_run_name"), "run", ["name"], unique=False)
    op.create_index(op.f("ix_run_project_started"), "run", ["project", "started"], unique=False)
    op.create_index(op.f("ix_run_started"), "run", ["started"], unique=False)
    op.create_table(
        "session",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("scope", sa.String(length=16), nullable=False),
        sa.Column("created", sa.Float(precision=53), nullable=False),
        sa.Column("expires", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_session")),
    )
    op.create_table(
        "alert",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("run", sa.String(length=128), nullable=False),
        sa.Column("rule", sa.String(length=64), nullable=False),
        sa.Column("severity", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("fix", sa.Text(), nullable=False),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("ranks", sa.Text(), nullable=False),
        sa.Column("gain_pct", sa.Float(precision=53), nullable=True),
        sa.Column("since", sa.Float(precision=53), nullable=False),
        sa.Column("since_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("fired", sa.Float(precision=53), nullable=True),
        sa.Column("resolved", sa.Float(precision=53), nullable=True),
        sa.Column("acknowledged", sa.Float(precision=53), nullable=True),
        sa.Column("muted_until", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(["run"], ["run.id"], name=op.f("fk_alert_run"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert")),
    )
    op.create_index(op.f("ix_alert_run_state"), "alert", ["run", "state"], unique=False)
    op.create_index(op.f("ix_alert_state_since"), "alert", ["state", "since"], unique=False)
    op.create_table(
        "attempt",
        sa.Column("run", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("start_step", sa.BigInteger(), nullable=False),
        sa.Column("started", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["run.id"], name=op.f("fk_attempt_run"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run", "attempt", name=op.f("pk_attempt")),
    )
    op.create_table(
        "event",
        sa.Column("id", RowId, autoincrement=True, nullable=False),
        sa.Column("run", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("source", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("time", sa.Float(precision=53), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["run.id"], name=op.f("fk_event_run"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event")),
    )
    op.create_index(op.f("ix_event_run_kind"), "event", ["run", "kind"], unique=False)
    op.create_table(
        "rule_state",
        sa.Column("run", sa.String(length=128), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("state", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["run.id"], name=op.f("fk_rule_state_run"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run", name=op.f("pk_rule_state")),
    )
    op.create_table(
        "series",
        sa.Column("id", RowId, autoincrement=True, nullable=False),
        sa.Column("run", sa.String(length=128), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["run.id"], name=op.f("fk_series_run"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_series")),
        sa.UniqueConstraint("run", "rank", "name", name=op.f("uq_series_run_rank_name")),
    )
    op.create_table(
        "source",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("run", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("host", sa.String(length=256), nullable=True),
        sa.Column("pid", sa.Integer(), nullable=True),
        sa.Column("started", sa.Float(precision=53), nullable=False),
        sa.Column("contact", sa.Float(precision=53), nullable=False),
        sa.Column("ended", sa.Float(precision=53), nullable=True),
        sa.Column("clock_offset_s", sa.Float(precision=53), nullable=True),
        sa.Column("heartbeat", sa.Boolean(), nullable=False),
        sa.Column("seq_floor", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["run.id"], name=op.f("fk_source_run"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_source")),
    )
    op.create_index(op.f("ix_source_run_attempt"), "source", ["run", "attempt"], unique=False)
    op.create_index(op.f("ix_source_state"), "source", ["state"], unique=False)
    op.create_table(
        "tail",
        sa.Column("id", RowId, autoincrement=True, nullable=False),
        sa.Column("run", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("source", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("received", sa.Float(precision=53), nullable=False),
        sa.Column("frame", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["run.id"], name=op.f("fk_tail_run"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tail")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_tail_run_rank"), "tail", ["run", "rank"], unique=False)
    op.create_table(
        "axis",
        sa.Column("key", RowId, autoincrement=False, nullable=False),
        sa.Column("series", sa.BigInteger(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["series"], ["series.id"], name=op.f("fk_axis_series"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_axis")),
    )
    op.create_index(op.f("ix_axis_series"), "axis", ["series"], unique=False)
    op.create_table(
        "block",
        sa.Column("series", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("block", sa.BigInteger(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("nonfinite", sa.Integer(), nullable=False),
        sa.Column("min", sa.Float(precision=53), nullable=True),
        sa.Column("max", sa.Float(precision=53), nullable=True),
        sa.Column("sum", sa.Float(precision=53), nullable=False),
        sa.Column("first_time", sa.Float(precision=53), nullable=False),
        sa.Column("last_time", sa.Float(precision=53), nullable=False),
        sa.Column("cells", sa.LargeBinary(), nullable=False),
        sa.Column("axis", sa.BigInteger(), nullable=True),
        sa.Column("payload", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["series"], ["series.id"], name=op.f("fk_block_series"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("series", "attempt", "block", name=op.f("pk_block")),
    )
    op.create_index(op.f("ix_block_axis"), "block", ["axis"], unique=False)
    op.create_table(
        "delivery",
        sa.Column("id", sa.String(length=96), nullable=False),
        sa.Column("channel", sa.String(length=64), nullable=False),
        sa.Column("alert", sa.String(length=64), nullable=True),
        sa.Column("event", sa.String(length=32), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("created", sa.Float(precision=53), nullable=False),
        sa.Column("due", sa.Float(precision=53), nullable=False),
        sa.Column("delivered", sa.Float(precision=53), nullable=True),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["alert"], ["alert.id"], name=op.f("fk_delivery_alert"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["channel"], ["channel.id"], name=op.f("fk_delivery_channel"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_delivery")),
    )
    op.create_index(op.f("ix_delivery_alert"), "delivery", ["alert"], unique=False)
    op.create_index(op.f("ix_delivery_state_due"), "delivery", ["state", "due"], unique=False)
    op.create_table(
        "last",
        sa.Column("series", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("time", sa.Float(precision=53), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["series"], ["series.id"], name=op.f("fk_last_series"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("series", name=op.f("pk_last")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "rollup",
        sa.Column("series", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("chunk", sa.BigInteger(), nullable=False),
        sa.Column("cells", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["series"], ["series.id"], name=op.f("fk_rollup_series"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("series", "attempt", "level", "chunk", name=op.f("pk_rollup")),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    for table in (
        "rollup",
        "last",
        "delivery",
        "block",
        "axis",
        "tail",
        "source",
        "series",
        "rule_state",
        "event",
        "attempt",
        "alert",
        "session",
        "run",
        "ledger",
        "idempotency",
        "cursor",
        "channel",
        "audit",
        "api_key",
    ):
        op.drop_table(table)
