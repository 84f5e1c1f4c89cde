"""Kernels in Triton, for GPUs. Each is tested against the plain operations it stands for."""

import os
import shutil
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def is_available() -> bool:
    """Triton comes with torch where torch has GPUs to run on; it needs a compiler of C, and
    Python's own headers."""
    compilers = os.environ.get("CC", "gcc"), "clang"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return find_spec("triton") is not None and header.exists() and any(map(shutil.which, compilers))
