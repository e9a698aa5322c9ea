"""Thresholds of projects with a name of up to 256 characters, as in all other tables: 0006 made 128 of them at first. PostgreSQL
alone looks at the length."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("rule_setting", "project", type_=sa.String(256))
