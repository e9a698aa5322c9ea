"""Whether samples came for steps that ClickHouse has summed up already: most questions need not look for them."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

_UNKNOWN = str(2**63 - 1)  # of what was summed up before: there may be some


def upgrade() -> None:
    op.add_column("sample_rollup", sa.Column("late", sa.BigInteger, nullable=False, server_default=_UNKNOWN))
