"""Retention finds what is old without going through everything."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    has_payload = sa.text("payload IS NOT NULL")
    op.create_index(
        "ix_block_last_time", "block", ["last_time"], sqlite_where=has_payload, postgresql_where=has_payload
    )
    op.create_index("ix_bundle_last_time", "bundle", ["last_time"])
    may_go = sa.text("kind NOT IN ('state', 'context', 'gpu')")
    op.create_index("ix_event_time", "event", ["time"], sqlite_where=may_go, postgresql_where=may_go)
