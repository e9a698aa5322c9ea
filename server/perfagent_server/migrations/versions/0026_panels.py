"""Panels of one's own, and notes on charts."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "panel",
        sa.Column("project", sa.String(256), nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("title", sa.String(128), nullable=False),
        sa.Column("lines", sa.Text(), nullable=False),
        sa.Column("who", sa.String(256), nullable=False, server_default=""),
        sa.Column("created", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("project", "id", name=op.f("pk_panel")),
    )
    op.create_table(
        "annotation",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("run", sa.String(128), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("who", sa.String(256), nullable=False, server_default=""),
        sa.Column("created", sa.Float(53), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["run.id"], name=op.f("fk_annotation_run"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_annotation")),
    )
    op.create_index(op.f("ix_annotation_run_step"), "annotation", ["run", "step"])
