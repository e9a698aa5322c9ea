"""Adds to a session the key that opened it, so that it ends with the key. The key of present sessions is unknown: they
end now.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("DELETE FROM session")
    op.add_column("session", sa.Column("key", sa.String(length=16), nullable=True))
