"""Kernels in Triton, for GPUs. Each is tested against the plain operations it stands for."""

import os
import shutil
from functools import cache
from importlib.util import find_spec


@cache
def is_available() -> bool:
    """Triton comes with torch where torch has GPUs to run on; it needs a compiler of C."""
    compilers = os.environ.get("CC", "gcc"), "clang"
    return find_spec("triton") is not None and any(map(shutil.which, compilers))
