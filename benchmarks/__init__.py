"""Costs and gains of Ropeway, measured against plain transformers on the same machine."""
