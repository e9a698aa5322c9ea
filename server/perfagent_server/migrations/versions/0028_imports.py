"""Runs of other trackers that were imported, and how far."""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "data_import",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("project", sa.String(256), nullable=False),
        sa.Column("created", sa.Float(53), nullable=False),
        sa.Column("who", sa.String(128), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_data_import")),
    )
    op.create_table(
        "imported_run",
        sa.Column("run", sa.String(128), nullable=False),
        sa.Column("import_id", sa.String(64), nullable=False),
        sa.Column("source", sa.String(64), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("taken", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["run.id"], name=op.f("fk_imported_run_run"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run", name=op.f("pk_imported_run")),
    )
    op.create_index(op.f("ix_imported_run_import_id"), "imported_run", ["import_id"])
