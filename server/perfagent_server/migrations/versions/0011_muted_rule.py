"""A mute knows its rule: an alert may join a worse one, which is not muted with it."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("alert", sa.Column("muted_rule", sa.String(length=64), nullable=False, server_default=""))
    op.execute("UPDATE alert SET muted_rule = rule WHERE muted_until IS NOT NULL")
