"""Sealing files again after they were edited on purpose: those of a run or a comparison, or
settings chosen by trials."""

from pathlib import Path
from typing import Any

from rankup.errors import RankupError
from rankup.runs.comparison import INDEX, is_comparison, raw_index
from rankup.runs.folder import working_in, write_lines
from rankup.runs.records import (
    CONFIG,
    METRICS,
    raw_config,
    raw_lines,
    read_json,
    runs_in,
    unknown_settings,
)
from rankup.storage.atomic import write_json
from rankup.storage.seal import sealed, without_seal


def seal_again(path: Path) -> str:
    """Seal the files at a path as they are, and return a sentence that says which."""
    if path.is_file():
        return _seal_choice(path)
    if is_comparison(path):
        with working_in([path]):
            _write(path / INDEX, without_seal(raw_index(path)))
        return f"sealed {path / INDEX} as it is; its runs are sealed one by one"
    if (runs := runs_in(path)) and runs != [path]:
        raise RankupError(f"{path} holds {len(runs)} runs: name one of them, such as {runs[0]}")
    return _seal_run(path)


def _seal_run(run: Path) -> str:
    path = run / CONFIG
    settings = without_seal(raw_config(path))
    if unknown := unknown_settings(settings):
        raise RankupError(f"{path} has a setting {unknown[0]!r}, which no run has: remove it")
    with working_in([run]):
        lines = [_without_seal(line) for line in raw_lines(run / METRICS)]
        _write(path, settings)
        if lines:
            write_lines(run, lines)
    count = f"{len(lines)} line{'s' if len(lines) != 1 else ''}"
    return f"sealed {path} and {count} of {run / METRICS} as they are"


def _without_seal(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "seal"}


def _seal_choice(path: Path) -> str:
    """Seal a file of settings that `rankup tune` has written."""
    what = f"{path} is neither a run folder nor a file of settings that `rankup tune` wrote"
    choice = read_json(path, what)
    if not isinstance(choice, dict) or not {"method", "chosen"} <= choice.keys():
        raise RankupError(what)
    _write(path, without_seal(choice))
    return f"sealed {path} as it is"


def _write(path: Path, data: dict[str, Any]) -> None:
    try:
        write_json(path, sealed(data))
    except OSError as error:
        raise RankupError(f"cannot write to {path}: {error.strerror}") from error
