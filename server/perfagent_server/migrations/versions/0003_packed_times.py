"""Marks databases whose times are packed in a new form.

The tables do not change. An older version would misread the new times in the tail and in axes, so it refuses a database
of this revision. What it has written is still read.
"""

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None: ...
