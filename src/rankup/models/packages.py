"""The optional packages that models come from: importing them when they are needed, and their
versions."""

from importlib import import_module, metadata
from typing import Any

from rankup.errors import RankupError


def imported(package: str, wanted_by: str) -> Any:
    """Import a package. Raises `RankupError` with one sentence if that fails.

    Args:
        wanted_by: what needs the package, for the sentence.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise RankupError(f"{wanted_by} needs {package}, which needs {error.name}") from error
        raise RankupError(
            f"{wanted_by} needs the package {package}: pip install 'rankup[real]'"
        ) from None
    # Of any kind, such as by a torchvision that was built for another torch.
    except Exception as error:
        raise RankupError(
            f"{wanted_by} needs the package {package}, which does not load: {first_line(error)}"
        ) from error


def version_of(package: str) -> str | None:
    """The installed version of a package, without importing it; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class if that is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
