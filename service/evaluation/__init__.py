"""Measuring: documents, protocols, scoring, and what comes out of it."""
