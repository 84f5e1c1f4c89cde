"""Training on one task, and testing."""
