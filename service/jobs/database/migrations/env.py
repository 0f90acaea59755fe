"""Run by Alembic: migrates the connection that the caller opened, inside the caller's transaction."""

from alembic import context

from service.jobs.database.opening import VERSION_TABLE
from service.jobs.database.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,
)
context.run_migrations()
