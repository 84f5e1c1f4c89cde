"""Reading the files of a run's folder, for everything that resumes a run or shows it.

config.json     what was asked for
metrics.jsonl   a line per task learned: classes, accuracies, parameters, replay buffer, seconds
net/            what the method knows
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from rankup.errors import RankupError
from rankup.metrics import AccuracyMatrix
from rankup.runs.request import Device, Net, Request
from rankup.training.recipe import Recipe

Choice = TypeVar("Choice", Net, Device)

CONFIG = "config.json"
METRICS = "metrics.jsonl"
NET = "net"
# Settings that follow from a seed. The checksum of images of one's own is taken over tasks as the
# seed has drawn them.
OF_A_SEED = ("seed", "task_names", "data")


def runs_in(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, or the folders of all its seeds if it holds several."""
    if (folder / CONFIG).exists():
        return [folder]
    seeds = (path.parent for path in folder.glob(f"seed-*/{CONFIG}"))
    return sorted(seeds, key=lambda run: (len(run.name), run.name))  # 10 after 9


def read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RankupError(f"{path.parent} is not a run folder: it has no {CONFIG}") from None
    except OSError as error:
        raise RankupError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError:
        raise RankupError(f"{path} is truncated or edited: it is not JSON") from None
    for key in ("stream", "method"):
        if not isinstance(config, dict) or key not in config:
            raise RankupError(f"{path} does not hold the settings of a run: it has no {key!r}")
    return dict(config)


def setting(path: Path, config: dict[str, Any], name: str, kind: Any, expected: str = "") -> Any:
    """One of the settings in that file; refused, never guessed, if its type is wrong."""
    if name not in config:
        raise RankupError(f"{path} does not hold the settings of a run: it has no {name!r}")
    value = config[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise no_setting(path, name, value, expected)
    return value


def no_setting(path: Path, name: str, value: Any, expected: str) -> RankupError:
    what = f", expected {expected}" if expected else ""
    return RankupError(
        f"{path} does not hold the settings of a run: its {name!r} is {value!r}{what}"
    )


def recipe_of(settings: Mapping[str, Any]) -> Recipe:
    """The recipe among a run's settings, where it is stored along with its name."""
    try:
        return Recipe(**{key: value for key, value in settings.items() if key != "name"})
    except TypeError as error:
        raise RankupError(f"the settings of a run do not hold a recipe: {error}") from None


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """A line for each task that a run has learned."""
    return read_metrics(folder / METRICS)[0]


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], AccuracyMatrix]:
    """A line for each task learned, and the matrix of their accuracies."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        content = b""
    except OSError as error:
        raise RankupError(f"{path} cannot be read: {error.strerror}") from error
    *whole, rest = content.split(b"\n")
    if _parsed(rest) is not None:  # otherwise it is empty, or was cut off by a crash
        whole.append(rest)
    lines: list[dict[str, Any]] = []
    matrix = AccuracyMatrix()
    for number, text in enumerate(whole, start=1):
        line = _parsed(text)
        try:
            lines.append(_checked(line))
            matrix.add(lines[-1]["accuracy"])
        except RankupError as error:
            raise RankupError(f"line {number} of {path} is broken: {error}") from None
    return lines, matrix


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _checked(line: Any) -> dict[str, Any]:
    if not isinstance(line, dict):
        raise RankupError("it is not a JSON object")
    for key in ("task", "accuracy", "parameters", "buffer", "seconds"):
        if key not in line:
            raise RankupError(f"it has no {key!r}")
    for key in ("parameters", "buffer", "seconds"):
        value = line[key]
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise RankupError(f"{key!r} is {value!r}, not a number")
    names = line.get("classes") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RankupError(f"'classes' is {names!r}, not a list of names")
    return line


def as_begun(
    method: str,
    options: dict[str, Any],
    request: Request,
    root: Path,
    said: Callable[[str], bool],
) -> tuple[str, dict[str, Any], Request]:
    """The method, its given options and the request of `rankup run`, with everything not given
    taken from the run in that folder, or from the first of several seeds there. If there is none,
    nothing changes.

    Args:
        said: whether an option was given, by its name.
    """
    runs = runs_in(root)
    if not runs:
        return method, options, request
    stored = _Stored(runs[0] / CONFIG)
    before: dict[str, Any] = {
        "stream": stored.get("stream", str),
        "net": stored.one_of("net", Net),
        "width": stored.get("width", int),
        "rank": stored.get("rank", str),
        "seeded": stored.get("seeded", str | None),
        "device": stored.one_of("device", Device),
    }
    if not (said("seed") or said("seeds")):
        before |= _seeds(root, runs)
    recipe = stored.get("recipe", dict)
    if not said("recipe"):
        names = {item.name for item in fields(Recipe)} & recipe.keys()
        before["recipe"] = recipe.get("name", request.recipe)
        before["recipe_options"] = {name: recipe[name] for name in names} | request.recipe_options
        before["is_complete"] = len(names) == len(fields(Recipe))
    request = replace(request, **{k: v for k, v in before.items() if not said(k)})
    method = method if said("method") else stored.get("method", str)
    if method == stored.get("method", str):
        options = stored.get("options", dict) | options
    return method, options, request


def _seeds(root: Path, runs: list[Path]) -> dict[str, int]:
    seeds = sorted(_Stored(run / CONFIG).get("seed", int) for run in runs)
    if seeds[-1] - seeds[0] >= len(seeds):
        raise RankupError(
            f"{root} holds seeds {', '.join(map(str, seeds))}: say with --seed and --seeds which "
            "to continue"
        )
    return {"seed": seeds[0], "seeds": len(seeds)}


class _Stored:
    """The settings of a run, each checked when it is read."""

    def __init__(self, path: Path) -> None:
        self.path, self.config = path, read_config(path)

    def get(self, name: str, kind: Any) -> Any:
        return setting(self.path, self.config, name, kind)

    def one_of(self, name: str, choices: type[Choice]) -> Choice:
        value = self.get(name, str)
        if value not in list(choices):
            raise no_setting(self.path, name, value, f"one of {', '.join(choices)}")
        return choices(value)
