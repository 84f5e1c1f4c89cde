"""Triton kernels, each tested against the torch operations that it replaces."""

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
    """Whether all that kernels need is installed and a trivial kernel runs."""
    if not _is_installed():
        return False
    try:
        from rankup.kernels.trial import run

        run()
    except Exception:  # from Triton, a compiler or a disk: then torch's operations are used
        return False
    return True


def _is_installed() -> bool:
    """Whether Triton, which comes with torch for GPUs, is installed, with the C compiler and the
    headers of Python that it needs."""
    compilers = os.environ.get("CC", "gcc"), "clang"
    # Debian's default scheme is another one than that of the headers.
    folders = (sysconfig.get_path("include", s) for s in (_SCHEME, "posix_prefix"))
    headers = any(Path(folder, "Python.h").exists() for folder in folders)
    return find_spec("triton") is not None and headers and any(map(shutil.which, compilers))


def in_use() -> AbstractContextManager[object]:
    """Inside, kernels replace torch's operations where they can."""
    if not is_available():
        return nullcontext()
    from rankup.kernels.exchange import Exchange

    return Exchange()


def refuse_second_derivatives() -> None:
    """Raise if a kernel's backward pass is to be differentiated: torch would treat its result as
    constant."""
    if torch.is_grad_enabled():
        raise RuntimeError("kernels of ours have no second derivatives")
