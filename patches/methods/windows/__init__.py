"""Windows: which keys a query attends to at all."""
