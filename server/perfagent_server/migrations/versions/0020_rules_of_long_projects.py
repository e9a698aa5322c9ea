"""Widens rule_setting.project from 128 to 256 characters, the longest name of a project. Only PostgreSQL enforces the
length, and 0006 makes 256 now."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("rule_setting", "project", type_=sa.String(256))
