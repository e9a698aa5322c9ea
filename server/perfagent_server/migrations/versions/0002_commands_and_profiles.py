"""What a run is asked for (command, command_source) and the profiles it sends back (profile, profile_part)."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "command",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("run", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("params", sa.Text(), nullable=False),
        sa.Column("ranks", sa.Text(), nullable=True),
        sa.Column("who", sa.String(length=128), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("created", sa.Float(precision=53), nullable=False),
        sa.Column("expires", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["run.id"], name=op.f("fk_command_run"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_command")),
    )
    op.create_index(op.f("ix_command_run_created"), "command", ["run", "created"], unique=False)
    op.create_table(
        "command_source",
        sa.Column("command", sa.String(length=32), nullable=False),
        sa.Column("source", sa.String(length=64), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("handed", sa.Float(precision=53), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("answered", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(
            ["command"], ["command.id"], name=op.f("fk_command_source_command"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("command", "source", name=op.f("pk_command_source")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "profile",
        sa.Column("run", sa.String(length=128), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("time", sa.Float(precision=53), nullable=False),
        sa.Column("parts", sa.Integer(), nullable=False),
        sa.Column("summary", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["run.id"], name=op.f("fk_profile_run"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run", "id", name=op.f("pk_profile")),
    )
    op.create_index(op.f("ix_profile_run_time"), "profile", ["run", "time"], unique=False)
    op.create_table(
        "profile_part",
        sa.Column("run", sa.String(length=128), nullable=False),
        sa.Column("profile", sa.String(length=64), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["run.id"], name=op.f("fk_profile_part_run"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run", "profile", "part", name=op.f("pk_profile_part")),
    )


def downgrade() -> None:
    for table in ("profile_part", "profile", "command_source", "command"):
        op.drop_table(table)
