"""Linear layers on a CPU: their products, the fastest ones for each number of rows, and packed weights."""
