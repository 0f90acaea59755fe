"""Pages of the documentation that the code writes: every method, and the primer."""
