"""Which samples in ClickHouse count."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_ROW_ID = sa.BigInteger().with_variant(sa.INTEGER(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "sample_extent",
        sa.Column("series", sa.BigInteger, nullable=False),
        sa.Column("attempt", sa.BigInteger, nullable=False),
        sa.Column("first_step", sa.BigInteger, nullable=False),
        sa.Column("last_step", sa.BigInteger, nullable=False),
        sa.Column("samples", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("series", "attempt", name="pk_sample_extent"),
        sa.ForeignKeyConstraint(["series"], ["series.id"], name="fk_sample_extent_series", ondelete="CASCADE"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "sample_rollup",
        sa.Column("run", sa.String(128), nullable=False),
        sa.Column("attempt", sa.BigInteger, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("batch", sa.BigInteger, nullable=False),
        sa.Column("generations", sa.LargeBinary, nullable=False),
        sa.Column("thinned", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("thinned_at", sa.Float(53)),
        sa.PrimaryKeyConstraint("run", "attempt", name="pk_sample_rollup"),
        sa.ForeignKeyConstraint(["run"], ["run.id"], name="fk_sample_rollup_run", ondelete="CASCADE"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "sample_deletion",
        sa.Column("id", _ROW_ID, autoincrement=True, nullable=False),
        sa.Column("run", sa.String(128), nullable=False),
        sa.Column("batch", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_sample_deletion"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_sample_deletion_run", "sample_deletion", ["run"])
