"""Keeping memory that tensors no longer need, instead of returning it to the system."""

import ctypes
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as in malloc.h
_LARGEST_KEPT = 2**30  # bytes of a tensor
_MOST_KEPT = 2**31 - 1


@cache
def keep_freed_memory() -> None:
    """Keep it for the next tensor, where the C library is glibc.

    By default glibc returns large tensors to the system as soon as they are freed, and the system
    clears every page of the next one: a quarter of the time of ResNet18 on a CPU, see
    docs/performance.md. This affects the whole process, so it is only for processes of our own.
    """
    if sys.platform != "linux":
        return
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:  # other C libraries have none
        tune(_MMAP_THRESHOLD, _LARGEST_KEPT)
        tune(_TRIM_THRESHOLD, _MOST_KEPT)
