"""One-time addresses are kept in the database: any server may be the one that is asked with them."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "login_link",
        sa.Column("digest", sa.LargeBinary, primary_key=True),
        sa.Column("scope", sa.String(16), nullable=False),
        sa.Column("expires", sa.Float(53), nullable=False),
    )
