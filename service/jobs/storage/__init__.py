"""The database of jobs: tables, migrations, and the queries of owners and runners."""
