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
    """Whether everything that kernels need is installed, and a trivial one runs."""
    if not _is_installed():
        return False
    try:
        from rankup.kernels.trial import run

        run()
    except Exception:  # from Triton, its compilers or a disk: torch has operations, too
        return False
    return True


def _is_installed() -> bool:
    """Triton comes with torch if torch has GPUs to run on; it needs a C compiler and Python's own
    headers."""
    compilers = os.environ.get("CC", "gcc"), "clang"
    # On Debian they are where Python has them on other systems.
    folders = (sysconfig.get_path("include", s) for s in (_SCHEME, "posix_prefix"))
    headers = any(Path(folder, "Python.h").exists() for folder in folders)
    return find_spec("triton") is not None and headers and any(map(shutil.which, compilers))


def in_use() -> AbstractContextManager[object]:
    """Inside, kernels replace torch operations where they fit."""
    if not is_available():
        return nullcontext()
    from rankup.kernels.exchange import Exchange

    return Exchange()


def refuse_second_derivatives() -> None:
    """Refuse to differentiate a kernel's backward pass: torch would take its result for
    constant."""
    if torch.is_grad_enabled():
        raise RuntimeError("kernels of ours have no second derivatives")
