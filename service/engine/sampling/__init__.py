"""Tokens of a step: logits adjusted, distributions truncated, and one draw for all rows."""

from service.engine.sampling.tokens import sample, undone_on_error

__all__ = ["sample", "undone_on_error"]
