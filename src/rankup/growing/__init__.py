"""Turning a module into a network: what is planned, copied and replaced."""
