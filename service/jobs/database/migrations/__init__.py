"""Alembic's migrations; ``versions`` has one module each. They are applied when the database is opened."""
