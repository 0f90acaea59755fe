"""The products of linear layers that the first of equal servers has timed."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "products",
        sa.Column("kind", sa.Text(), primary_key=True),
        sa.Column("choices", sa.Text(), nullable=False),
    )
