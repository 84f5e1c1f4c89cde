"""Runs of the command line: what is asked for, their folders, several seeds at once, comparisons,
trials."""
