"""PostgreSQL does not try to compress what is packed already: frames, blocks and traces."""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_PACKED = {
    "axis": ["payload"],
    "block": ["cells", "payload"],
    "bundle": ["axis", "members", "newest", "payload"],
    "profile_part": ["data"],
    "rollup": ["cells"],
    "tail": ["frame"],
}


def upgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":
        return
    for table, columns in _PACKED.items():
        for column in columns:
            op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")
