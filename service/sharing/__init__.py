"""How tenants share one server: memory, the generation thread's time, and workers beside the model."""
