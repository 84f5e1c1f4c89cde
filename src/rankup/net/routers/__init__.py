"""Routers: ways to guess the task of an input from what was stored when each task was committed."""
