"""A command knows the alert that it was sent for, and the rule."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("alert", "rule"):
        op.add_column("command", sa.Column(name, sa.String(length=64), nullable=False, server_default=""))
