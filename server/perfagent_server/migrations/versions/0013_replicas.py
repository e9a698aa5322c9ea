"""Several servers on one database: who runs, who judges what, and what the others must hear of. The rules have a cursor for
each shard of runs."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "server",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("address", sa.Text, nullable=False),
        sa.Column("version", sa.String(32), nullable=False),
        sa.Column("started", sa.Float(53), nullable=False),
        sa.Column("seen", sa.Float(53), nullable=False),
        sa.Column("secrets", sa.String(32), nullable=False),
        sa.Column("watching", sa.Text, nullable=False, server_default="[]"),
    )
    op.create_table(
        "lease",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("server", sa.String(32), nullable=False),
        sa.Column("term", sa.BigInteger, nullable=False),
        sa.Column("expires", sa.Float(53), nullable=False),
    )
    op.create_table(
        "change",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("server", sa.String(32), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("detail", sa.Text, nullable=False, server_default=""),
        sa.Column("created", sa.Float(53), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_change_kind_id", "change", ["kind", "id"])
    for shard in "0123456789abcdef":
        op.execute(
            sa.text(
                "INSERT INTO cursor (name, tail_id) SELECT 'rules/' || :shard, tail_id FROM cursor WHERE name = 'rules'"
            ).bindparams(shard=shard)
        )
    op.execute("DELETE FROM cursor WHERE name = 'rules'")
