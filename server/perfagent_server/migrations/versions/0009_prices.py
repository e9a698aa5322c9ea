"""Projects have prices. A source knows which hardware it had, until when, and how much energy it took."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_NUMBER = sa.Float(precision=53)


def upgrade() -> None:
    op.add_column("source", sa.Column("worked_until", _NUMBER, nullable=True))
    op.add_column("source", sa.Column("gpus", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("source", sa.Column("cpu_cores", _NUMBER, nullable=True))
    op.add_column("source", sa.Column("gpu_energy_j", _NUMBER, nullable=True))
    op.add_column("source", sa.Column("gpu_energy_per_step_j", _NUMBER, nullable=True))
    op.create_table(
        "price",
        sa.Column("project", sa.String(length=256), nullable=False),
        sa.Column("gpu_hour", _NUMBER, nullable=True),
        sa.Column("cpu_core_hour", _NUMBER, nullable=True),
        sa.Column("kwh", _NUMBER, nullable=True),
        sa.Column("currency", sa.String(length=16), nullable=False),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_price")),
    )
