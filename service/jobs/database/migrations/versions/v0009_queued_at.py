"""The time at which a job was last queued. Long requests from before 0008 get their form in listings."""

import json

import sqlalchemy as sa
from alembic import op

from service.jobs.database.tables import written
from service.jobs.storage.listed import LISTED_REQUEST, listed

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

JOBS = sa.table("jobs", *map(sa.column, ("number", "request", "listed")))


def upgrade() -> None:
    op.add_column("jobs", sa.Column("queued_at", sa.DateTime(timezone=True)))
    connection = op.get_bind()
    long = sa.func.length(JOBS.c.request) > LISTED_REQUEST
    for (number,) in connection.execute(sa.select(JOBS.c.number).where(long, JOBS.c.listed.is_(None))).all():
        mine = JOBS.c.number == number
        request = json.loads(connection.scalar(sa.select(JOBS.c.request).where(mine)) or "{}")
        connection.execute(JOBS.update().where(mine).values(listed=written(listed(request))))
