"""Runs started from the command line: requests, folders, several seeds at once, comparisons,
trials."""
