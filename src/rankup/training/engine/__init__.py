"""Training steps, and how they are run: one by one, or captured in a CUDA graph."""
