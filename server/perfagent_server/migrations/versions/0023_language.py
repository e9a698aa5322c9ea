"""The language of a channel's messages."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("channel", sa.Column("language", sa.String(8), nullable=False, server_default="en"))
