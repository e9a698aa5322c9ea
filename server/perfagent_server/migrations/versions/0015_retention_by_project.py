"""Projects have retention settings; of each run it is known how much room it takes, and at which resolution."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_NUMBER = sa.Float(precision=53)
_BYTES = ("samples_bytes", "cells_bytes", "rollups_bytes", "other_bytes")


def upgrade() -> None:
    op.create_table(
        "retention_setting",
        sa.Column("project", sa.String(length=256), nullable=False),
        sa.Column("settings", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_retention_setting")),
    )
    op.create_table(
        "run_storage",
        sa.Column("run", sa.String(length=128), nullable=False),
        sa.Column("finest_steps", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("thinned", _NUMBER, nullable=False, server_default="0"),
        sa.Column("measured", _NUMBER, nullable=False, server_default="0"),
        *(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0") for name in _BYTES),
        sa.ForeignKeyConstraint(["run"], ["run.id"], name=op.f("fk_run_storage_run"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run", name=op.f("pk_run_storage")),
    )
