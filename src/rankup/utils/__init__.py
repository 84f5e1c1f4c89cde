"""Modes of torch, signals and memory."""
