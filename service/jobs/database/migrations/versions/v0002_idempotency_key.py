"""A client's name for a submission: a repetition makes no second job."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("idempotency_key", sa.String(255)))
    op.create_index("jobs_by_idempotency_key", "jobs", ["tenant", "idempotency_key"], unique=True)
