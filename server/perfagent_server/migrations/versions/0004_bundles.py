"""Short blocks of many series as one row (bundle)."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import sqlite

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

RowId = sa.BigInteger().with_variant(sqlite.INTEGER(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "bundle",
        sa.Column("id", RowId, autoincrement=True, nullable=False),
        sa.Column("run", sa.String(length=128), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("block", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.BigInteger(), nullable=False),
        sa.Column("low", sa.BigInteger(), nullable=False),
        sa.Column("high", sa.BigInteger(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("last_time", sa.Float(precision=53), nullable=False),
        sa.Column("members", sa.LargeBinary(), nullable=False),
        sa.Column("axis", sa.LargeBinary(), nullable=False),
        sa.Column("newest", sa.LargeBinary(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["run.id"], name=op.f("fk_bundle_run"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_bundle")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_bundle_run_rank_attempt"), "bundle", ["run", "rank", "attempt"], unique=False)
