"""The setup of the server that took a job's request."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("setup", sa.String(64)))


def downgrade() -> None:
    op.drop_column("jobs", "setup")
