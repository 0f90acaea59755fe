"""Sharing one server between tenants: memory, the generation thread's time, and workers beside the model."""
