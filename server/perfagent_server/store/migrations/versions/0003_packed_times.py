"""Nothing changes in the tables: times in the tail and in axes are packed anew from here on, in a form that an older version
would take for none. It refuses a database of this revision instead; what it has written is still read."""

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None: ...
