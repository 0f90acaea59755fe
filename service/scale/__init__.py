"""Replicas on Ray Serve: the same application in several processes of one machine (extra `scale`)."""
