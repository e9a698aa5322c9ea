"""Views of pages that people saved under a name."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "saved_view",
        sa.Column("project", sa.String(256), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("page", sa.String(16), nullable=False),
        sa.Column("query", sa.Text(), nullable=False),
        sa.Column("who", sa.String(256), nullable=False),
        sa.Column("changed", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("project", "name", name=op.f("pk_saved_view")),
    )
