"""Every change of the tables since the first; released ones are never edited."""
