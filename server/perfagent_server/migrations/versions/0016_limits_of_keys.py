"""Limits of its own for a key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_key", sa.Column("limits", sa.Text()))


def downgrade() -> None:
    op.drop_column("api_key", "limits")
