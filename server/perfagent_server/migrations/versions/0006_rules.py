"""Alerts say in a title what is wrong, which cause it has and what it costs. Rules have settings (rule_setting), of all
projects or of one, and may be switched off for a run."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("title", "cause", "cost"):
        op.add_column("alert", sa.Column(name, sa.Text(), nullable=False, server_default=""))
    op.add_column("run", sa.Column("rules_off", sa.Text(), nullable=False, server_default="[]"))
    op.create_table(
        "rule_setting",
        sa.Column("project", sa.String(length=256), nullable=False),
        sa.Column("rule", sa.String(length=64), nullable=False),
        sa.Column("settings", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("project", "rule", name=op.f("pk_rule_setting")),
    )
