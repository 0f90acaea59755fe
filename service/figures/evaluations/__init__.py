"""Pictures of the results of each evaluation."""
