"""Training steps, run one by one or captured in a CUDA graph."""
