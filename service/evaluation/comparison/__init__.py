"""Several results of one evaluation as one: models, weights or versions side by side, and their differences."""
