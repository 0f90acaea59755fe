"""Unfinished units as rows, which several processes claim; the digest of a job's plan."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("plan", sa.String(64)))
    op.create_table(
        "unfinished_units",
        sa.Column("job", BIG_ID, sa.ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True),
        sa.Column("position", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text()),
        sa.Column("lease_until", sa.DateTime(timezone=True)),
        sa.Column("tokens_done", sa.BigInteger(), nullable=False),
    )
    claimed = sa.text("owner IS NOT NULL")
    op.create_index(
        "unfinished_units_claimed",
        "unfinished_units",
        ["key"],
        unique=True,
        sqlite_where=claimed,
        postgresql_where=claimed,
    )
