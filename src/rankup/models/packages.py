"""Optional packages that models come from, imported where one is used, and their versions."""

from importlib import import_module, metadata
from typing import Any

from rankup.errors import RankupError


def imported(package: str, wanted_by: str) -> Any:
    """A package, or one sentence that says why it cannot be had."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise RankupError(f"{wanted_by} needs {package}, which needs {error.name}") from error
        raise RankupError(
            f"{wanted_by} needs the package {package}: pip install 'rankup[real]'"
        ) from None
    # Such as of a torchvision that was built for another torch.
    except Exception as error:
        raise RankupError(
            f"{wanted_by} needs the package {package}, which does not load: {first_line(error)}"
        ) from error


def version_of(package: str) -> str | None:
    """The version that is installed, without importing it; None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    """An error's first line, or what kind it is if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
