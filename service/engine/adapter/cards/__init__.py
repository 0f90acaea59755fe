"""Steps that replay graphs, and the work of the host between them."""
