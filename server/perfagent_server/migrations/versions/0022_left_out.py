"""How many names of metrics and tags of a run had no room, so that its page says so."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("run", sa.Column("left_out", sa.Text(), nullable=False, server_default="{}"))
