"""The seal of files of JSON, under the name by which networks and runs know it."""

from rankup.utils.seal import seal

__all__ = ["seal"]
