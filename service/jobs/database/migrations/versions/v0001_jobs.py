"""Jobs, their finished units, and outcomes."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("number", BIG_ID, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(32), nullable=False, unique=True),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("evaluation", sa.Text(), nullable=False),
        sa.Column("model", sa.Text()),
        sa.Column("models", sa.Text(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("started_at", MOMENT),
        sa.Column("finished_at", MOMENT),
        sa.Column("units_total", sa.Integer(), nullable=False),
        sa.Column("units_done", sa.Integer(), nullable=False),
        sa.Column("units_reused", sa.Integer(), nullable=False),
        sa.Column("tokens_total", sa.BigInteger(), nullable=False),
        sa.Column("tokens_done", sa.BigInteger(), nullable=False),
        sa.Column("tokens_reused", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("added_by", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text()),
        sa.Column("lease_until", MOMENT),
        sa.Column("claims", sa.Integer(), nullable=False),
        sa.Column("last_unit", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text()),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("result", sa.Text()),
    )
    op.create_index("jobs_waiting", "jobs", ["state", "tenant", "number"])
    op.create_index("jobs_of_tenant", "jobs", ["tenant", "number"])
    op.create_table(
        "finished_units",
        sa.Column("job", BIG_ID, sa.ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("length", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("reused", sa.Boolean(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("summary", sa.Text(), nullable=False),
        sa.UniqueConstraint("job", "position"),
    )
    op.create_index("finished_units_by_key", "finished_units", ["key"])
    op.create_table(
        "outcomes",
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("checksum", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("used_at", MOMENT, nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
    )
    op.create_index("outcomes_by_use", "outcomes", ["used_at", "size"])
