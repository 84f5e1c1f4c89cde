"""Reports on a comparison of methods."""
