"""Users with roles, whose sessions end with them; and in the audit log on which thing of which project something was
done. Rows of the audit log from before have both in their detail.
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "account",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("folded", sa.String(length=256), nullable=False),
        sa.Column("password", sa.Text(), nullable=True),
        sa.Column("issuer", sa.String(length=512), nullable=True),
        sa.Column("subject", sa.String(length=256), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("created", sa.Float(precision=53), nullable=False),
        sa.Column("disabled", sa.Float(precision=53), nullable=True),
        sa.Column("used", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_account")),
        sa.UniqueConstraint("folded", name=op.f("uq_account_folded")),
        sa.UniqueConstraint("issuer", "subject", name=op.f("uq_account_issuer_subject")),
    )
    op.create_table(
        "account_role",
        sa.Column("account", sa.String(length=32), nullable=False),
        sa.Column("project", sa.String(length=256), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.ForeignKeyConstraint(["account"], ["account.id"], name=op.f("fk_account_role_account"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("account", "project", name=op.f("pk_account_role")),
    )
    op.create_table(
        "login_failure",
        sa.Column("bucket", sa.String(length=64), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("last", sa.Float(precision=53), nullable=False),
        sa.Column("blocked_until", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("bucket", name=op.f("pk_login_failure")),
    )
    op.add_column("session", sa.Column("account", sa.String(length=32), nullable=True))
    op.add_column("session", sa.Column("epoch", sa.Integer(), server_default="0", nullable=False))
    op.add_column("session", sa.Column("origin", sa.String(length=128), server_default="", nullable=False))
    op.add_column("session", sa.Column("agent", sa.String(length=256), server_default="", nullable=False))
    op.create_index(op.f("ix_session_account"), "session", ["account"])
    op.add_column("audit", sa.Column("thing", sa.String(length=256), server_default="", nullable=False))
    op.add_column("audit", sa.Column("project", sa.String(length=256), server_default="", nullable=False))
