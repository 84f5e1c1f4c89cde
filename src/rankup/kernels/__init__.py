"""Kernels in Triton, for GPUs. Each is tested against the plain operations it stands for."""

import os
import shutil
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

_SCHEME = sysconfig.get_default_scheme()


@cache
def is_available() -> bool:
    """Whether there is all that kernels need, and one that does next to nothing can be run."""
    if not _is_there():
        return False
    try:
        from rankup.kernels.trial import run

        run()
    except Exception:  # of Triton, of its compilers or of a disk: torch has operations, too
        return False
    return True


def _is_there() -> bool:
    """Triton comes with torch where torch has GPUs to run on; it needs a compiler of C, and
    Python's own headers."""
    compilers = os.environ.get("CC", "gcc"), "clang"
    # Debian has them where Python would have them elsewhere, too.
    folders = (sysconfig.get_path("include", s) for s in (_SCHEME, "posix_prefix"))
    headers = any(Path(folder, "Python.h").exists() for folder in folders)
    return find_spec("triton") is not None and headers and any(map(shutil.which, compilers))


def in_use() -> AbstractContextManager[object]:
    """Inside, operations of torch that a kernel stands for are done by it, where it fits."""
    if not is_available():
        return nullcontext()
    from rankup.kernels.exchange import Exchange

    return Exchange()


def refuse_second_derivatives() -> None:
    """Refuse in a backward pass of ours to be differentiated: torch would take what it gives for
    constant."""
    if torch.is_grad_enabled():
        raise RuntimeError("kernels of ours have no second derivatives")
