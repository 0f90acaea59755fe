"""Servers in other processes: against servers of other projects, under load, under attack."""
