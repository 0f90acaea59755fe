"""Attention, copying and loss by distance."""
