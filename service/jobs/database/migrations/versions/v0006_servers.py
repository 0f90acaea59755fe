"""The servers of a database, and the setup of the one that took a job's request."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("setup", sa.String(64)))
    op.create_table(
        "servers",
        sa.Column("owner", sa.Text(), primary_key=True),
        sa.Column("versions", sa.Text(), nullable=False),
        sa.Column("only_own", sa.Boolean(), nullable=False),
        sa.Column("refused", sa.Text(), nullable=False),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=False),
    )
