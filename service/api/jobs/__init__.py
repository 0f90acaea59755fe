"""The routes of durable jobs."""
