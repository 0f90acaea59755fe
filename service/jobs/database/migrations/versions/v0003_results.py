"""A separate table for packed results; jobs record the size of their request."""

import gzip

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JOBS = sa.table(
    "jobs",
    *map(sa.column, ("number", "id", "tenant", "evaluation", "request", "result", "request_bytes")),
    sa.column("created_at", sa.DateTime(timezone=True)),
)


def upgrade() -> None:
    results = op.create_table(
        "results",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("evaluation", sa.Text(), nullable=False),
        sa.Column("job", BIG_ID, sa.ForeignKey("jobs.number", ondelete="CASCADE"), unique=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
    )
    op.create_index("results_of_tenant", "results", ["tenant", "job", "created_at"])
    op.add_column("jobs", sa.Column("request_bytes", sa.BigInteger(), nullable=False, server_default="0"))
    connection = op.get_bind()
    connection.execute(JOBS.update().values(request_bytes=sa.func.length(JOBS.c.request)))
    done = sa.select(*(JOBS.c[name] for name in ("number", "id", "tenant", "evaluation", "created_at")))
    for number, job_id, tenant, evaluation, created_at in connection.execute(
        done.where(JOBS.c.result.is_not(None))
    ).all():
        text: str = connection.scalar(sa.select(JOBS.c.result).where(JOBS.c.number == number)) or ""
        data = gzip.compress(text.encode(), mtime=0)
        row = {"id": job_id, "tenant": tenant, "evaluation": evaluation, "job": number, "created_at": created_at}
        connection.execute(results.insert().values(row | {"size": len(data), "data": data}))
    op.drop_column("jobs", "result")
