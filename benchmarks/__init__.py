"""What Ropeway costs and gains, measured against plain transformers on the same machine."""
