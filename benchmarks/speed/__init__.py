"""Time, memory and cost, against plain transformers and of methods among themselves."""
