"""Responses of Ropeway's own routes. Clients import them without the rest of the service."""
