"""Reports on run folders and comparisons: tables for the terminal, plots, and one HTML page."""
