"""Users' own alerts."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "own_alert",
        sa.Column("project", sa.String(256), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("form", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("project", "name", name=op.f("pk_own_alert")),
    )
