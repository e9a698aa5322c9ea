"""Alerts have a note, a snooze and a history, and silences keep them from channels. A channel may be for some projects
or tags, groups its messages by run, and repeats them. A delivery knows its run, and when it may be sent at the earliest."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_TIME = sa.Float(precision=53)


def upgrade() -> None:
    op.add_column("alert", sa.Column("acknowledged_by", sa.String(length=256), nullable=False, server_default=""))
    op.add_column("alert", sa.Column("note", sa.Text(), nullable=False, server_default=""))
    op.add_column("alert", sa.Column("snoozed_until", _TIME, nullable=True))
    for name in ("projects", "tags"):
        op.add_column("channel", sa.Column(name, sa.Text(), nullable=False, server_default="[]"))
    for name in ("group_s", "repeat_s", "every_s"):
        op.add_column("channel", sa.Column(name, _TIME, nullable=False, server_default="0"))
    op.add_column("channel", sa.Column("summaries", sa.Boolean(), nullable=False, server_default="0"))
    op.add_column("channel", sa.Column("told", _TIME, nullable=True))
    op.add_column("channel", sa.Column("old_secret_until", _TIME, nullable=True))
    op.add_column("delivery", sa.Column("run", sa.String(length=128), nullable=True))
    op.add_column("delivery", sa.Column("urgent", sa.Boolean(), nullable=False, server_default="0"))
    op.add_column("delivery", sa.Column("ready", _TIME, nullable=False, server_default="0"))
    op.execute("UPDATE delivery SET run = (SELECT run FROM alert WHERE alert.id = delivery.alert)")
    op.create_table(
        "alert_history",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("alert", sa.String(length=64), nullable=False),
        sa.Column("time", _TIME, nullable=False),
        sa.Column("event", sa.String(length=32), nullable=False),
        sa.Column("who", sa.String(length=256), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["alert"], ["alert.id"], name=op.f("fk_alert_history_alert"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert_history")),
    )
    op.create_index(op.f("ix_alert_history_alert_time"), "alert_history", ["alert", "time"])
    op.create_table(
        "silence",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project", sa.String(length=256), nullable=False),
        sa.Column("tag", sa.String(length=256), nullable=False),
        sa.Column("run", sa.String(length=256), nullable=False),
        sa.Column("rule", sa.String(length=64), nullable=False),
        sa.Column("starts", _TIME, nullable=False),
        sa.Column("ends", _TIME, nullable=False),
        sa.Column("repeats", sa.String(length=16), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("who", sa.String(length=256), nullable=False),
        sa.Column("created", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_silence")),
    )
