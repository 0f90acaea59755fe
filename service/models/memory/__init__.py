"""The memory that a model's weights and its cache take."""
