"""The grown network: its tasks, mixed batches, merged modules and sizes."""
