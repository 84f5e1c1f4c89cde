"""Networks on disk."""
