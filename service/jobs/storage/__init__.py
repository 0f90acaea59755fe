"""Queries of the database of jobs, by its owners and runners."""
