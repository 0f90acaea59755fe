"""Several replicas of a server, real and simulated."""
