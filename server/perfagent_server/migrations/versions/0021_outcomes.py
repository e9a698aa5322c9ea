"""What a run that ended is called by its verdict, so that the table of runs filters and counts by it. The server settles it
for the runs that are there already."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

_UNSETTLED = sa.text("ended IS NOT NULL AND outcome IS NULL")


def upgrade() -> None:
    op.add_column("run", sa.Column("outcome", sa.String(16)))
    op.create_index("ix_run_unsettled", "run", ["ended"], sqlite_where=_UNSETTLED, postgresql_where=_UNSETTLED)
