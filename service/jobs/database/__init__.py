"""The database of jobs: opened, with its tables and migrations."""
