"""Reading the files of a run's folder, for everything that resumes a run or shows it. Files that do
not match their seals are refused.

config.json     the settings, sealed
metrics.jsonl   a line per task learned: classes, accuracies, parameters, replay buffer, seconds;
                each is sealed along with those before it
net/            the state of the method
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rankup.errors import RankupError
from rankup.methods import method_info
from rankup.metrics import AccuracyMatrix
from rankup.runs.request import NETS, Device, Request, check_net
from rankup.storage.seal import SealError, opened, seal
from rankup.training.recipe import Recipe
from rankup.utils.files import read_regular

CONFIG = "config.json"
METRICS = "metrics.jsonl"
NET = "net"
_MANIFEST = "manifest.json"
# Settings that depend on the seed. The checksum of the user's own images is one of them, because it
# covers tasks as the seed has drawn them.
OF_A_SEED = ("seed", "task_names", "data")
# Settings that never change when a run is resumed. The seals of its lines depend on them, so that
# lines of another run are noticed.
_FIXED = ("method", "net", "width", "rank", "seeded", "seed", "recipe")
# All settings. A config without a seal that has any others has lost its seal.
_SETTINGS = frozenset(_FIXED) | {
    *("stream", "options", "tasks", "device", "threads", "task_names", "versions"),
    *("held_out", "data", "tasks_in_stream", "inputs"),
    *("pretrained", "per_class", "preprocessing", "untold"),
}
_LARGEST_JSON = 1 << 26  # bytes
_LARGEST_METRICS = 1 << 28  # 1000 tasks take 20 million


def runs_in(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, or the folders of all its seeds if it holds several."""
    if os.path.lexists(folder / CONFIG):
        return [folder]
    seeds = (path.parent for path in folder.glob(f"seed-*/{CONFIG}"))
    return sorted(seeds, key=lambda run: (len(run.name), run.name))  # 10 after 9


def runs_below(folder: Path) -> Iterator[Path]:
    """All folders of runs below a folder, of any command, in order."""
    for path, folders, files in os.walk(folder):
        if CONFIG in (*files, *folders):  # a folder of this name is refused when it is read
            yield Path(path)
        folders[:] = sorted((f for f in folders if f != NET), key=lambda name: (len(name), name))


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a run, without their seal."""
    return _read_settings(path)[0]


def is_sealed(folder: Path) -> bool:
    """Whether a run's files have seals: all of them do if its config does."""
    return _read_settings(folder / CONFIG)[1]


def _read_settings(path: Path) -> tuple[dict[str, Any], bool]:
    config, is_sealed = opened(raw_config(path), path, path.parent)
    if not is_sealed and unknown_settings(config):
        raise SealError(path, path.parent)
    return config, is_sealed


def unknown_settings(config: Mapping[str, Any]) -> list[str]:
    """The names of settings that no run has."""
    return [name for name in config if name not in _SETTINGS]


def raw_config(path: Path) -> dict[str, Any]:
    """The settings of a run as they are in its file, whether or not they match their seal."""
    try:
        config = read_json(path, f"{path} is truncated or edited: it is not JSON")
    except FileNotFoundError:
        raise RankupError(f"{path.parent} is not a run folder: it has no {CONFIG}") from None
    for key in ("stream", "method"):
        if not isinstance(config, dict) or key not in config:
            raise RankupError(f"{path} does not hold the settings of a run: it has no {key!r}")
    return dict(config)


def read_json(path: Path, otherwise: str) -> Any:
    """The content of a JSON file.

    Args:
        otherwise: the error message for a file that is not JSON.
    """
    try:
        return json.loads(read_regular(path, _LARGEST_JSON))
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise RankupError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise RankupError(otherwise) from None


def unsealed_note(folders: Iterable[Path]) -> str:
    """A message about runs without seals in these folders; empty if there are none."""
    old = [
        folder for folder in folders if os.path.lexists(folder / CONFIG) and not is_sealed(folder)
    ]
    if not old:
        return ""
    others = f" (and {len(old) - 1} more)" if len(old) > 1 else ""
    return (
        f"{old[0]}{others} was begun by version 0.1 and has no seals: if its files are damaged, "
        f"nothing tells; `rankup seal {old[0]}` seals them as they are"
    )


def setting(path: Path, config: dict[str, Any], name: str, kind: Any, expected: str = "") -> Any:
    """A setting of a run, or an error if it is missing or of another type.

    Args:
        path: the file that it was read from.
        expected: what the error message says is expected.
    """
    if name not in config:
        raise RankupError(f"{path} does not hold the settings of a run: it has no {name!r}")
    value = config[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise no_setting(path, name, value, expected)
    return value


def no_setting(path: Path, name: str, value: Any, expected: str) -> RankupError:
    """The error for a setting with an invalid value."""
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
    """The lines of a run's metrics, one for each task learned, without their seals."""
    return read_metrics(folder / METRICS)[0]


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], AccuracyMatrix]:
    """The lines of a run's metrics, without their seals, and the matrix of their accuracies."""
    folder, config, are_sealed = path.parent, dict[str, Any](), False
    if os.path.lexists(folder / CONFIG):
        config, are_sealed = _read_settings(folder / CONFIG)
    saved = saved_tasks(folder)  # before the lines, because the run may go on meanwhile
    lines: list[dict[str, Any]] = []
    matrix, expected = AccuracyMatrix(), _first_seal(config)
    for number, line in enumerate(raw_lines(path), start=1):
        has_seal, given = "seal" in line, line.pop("seal", None)
        expected = _next_seal(expected, number, line)
        if has_seal != are_sealed or (are_sealed and given != expected):
            raise SealError(f"line {number} of {path}", folder)
        try:
            matrix.add(line["accuracy"])
        except RankupError as error:
            raise RankupError(f"line {number} of {path} is broken: {error}") from None
        lines.append(line)
    if are_sealed and saved > len(lines):
        refuse_mixed_up(folder, str(config.get("method")), saved, len(lines))
    return lines, matrix


def refuse_mixed_up(folder: Path, method: str, saved: int, listed: int) -> None:
    """Refuse a run unless `net/` has as many tasks as its metrics list, or one more, as a task is
    saved before its line is written. Seals cannot tell that the end of the metrics is lost. A
    method that is not continual saves all tasks at once.

    Args:
        saved: how many tasks `net/` has.
        listed: how many the metrics list.
    """
    if saved < listed:
        lacks = f"{folder / NET} lacks tasks that {METRICS} has (it holds {saved} of {listed})"
    elif saved > listed + 1 and method_info(method).continual:
        lacks = f"{folder / METRICS} lacks tasks that {NET}/ has (it lists {listed} of {saved})"
    else:
        return
    raise RankupError(f"{lacks}: put back what is missing, or start a new run with --out")


def saved_tasks(folder: Path) -> int:
    """How many tasks the manifests in a run's `net/` name. Damaged ones count as 0."""
    manifests = [folder / NET / _MANIFEST, *(folder / NET).glob(f"*/{_MANIFEST}")]  # one per task
    return sum(map(_tasks_in, manifests))


def _tasks_in(manifest: Path) -> int:
    try:
        tasks = json.loads(read_regular(manifest, _LARGEST_JSON))["tasks"]
        return len(tasks) if isinstance(tasks, list) else int(tasks)
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return 0


def unlisted_note(folders: Iterable[Path]) -> str:
    """A message about a run in these folders whose last task has no line, because the run was
    killed before it wrote it; empty if there is none."""
    for folder in folders:
        saved = saved_tasks(folder) if (folder / CONFIG).exists() else 0
        if saved and saved > (listed := len(read_lines(folder))):
            return (
                f"{folder} has learned {saved} tasks, of which {METRICS} lists {listed}: unless a "
                f"process is at work there, `rankup run --resume --out {folder}` completes it"
            )
    return ""


def raw_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file as they are, whether or not they match their seals."""
    try:
        content = read_regular(path, _LARGEST_METRICS)
    except (FileNotFoundError, NotADirectoryError):
        content = b""
    except OSError as error:
        raise RankupError(f"{path} cannot be read: {error.strerror}") from error
    *whole, rest = content.split(b"\n")
    if not _is_cut_off(rest):
        whole.append(rest)
    lines = []
    for number, text in enumerate(whole, start=1):
        try:
            lines.append(_checked(_parsed(text)))
        except RankupError as error:
            raise RankupError(f"line {number} of {path} is broken: {error}") from None
    return lines


def sealed_lines(
    config: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The lines of a run with these settings, each with its seal."""
    last, result = _first_seal(config), []
    for number, line in enumerate(lines, start=1):
        last = _next_seal(last, number, line)
        result.append({**line, "seal": last})
    return result


def _first_seal(config: Mapping[str, Any]) -> str:
    return seal({name: config.get(name) for name in _FIXED})


def _next_seal(before: str, number: int, line: Mapping[str, Any]) -> str:
    return seal({"before": before, "number": number, "line": line})


def _is_cut_off(rest: bytes) -> bool:
    """Whether the text after the last end of line is empty, or a line that a crash cut off, and
    not whole JSON, which was edited."""
    try:
        json.JSONDecoder().raw_decode(rest.decode(errors="replace"))
    except (ValueError, RecursionError):
        return True
    return False


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
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
    _check_untold(line.get("untold"))
    names = line.get("classes") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RankupError(f"'classes' is {names!r}, not a list of names")
    return line


def _check_untold(untold: Any) -> None:
    if untold is None:
        return
    lists = untold.values() if isinstance(untold, dict) else [None]
    if not all(isinstance(fractions, list) for fractions in lists):
        raise RankupError(f"'untold' is {untold!r}, not lists of fractions")


def as_begun(
    method: str,
    options: dict[str, Any],
    request: Request,
    root: Path,
    said: Callable[[str], bool],
) -> tuple[str, dict[str, Any], Request]:
    """Complete the method, its options and the request of `rankup run --resume` from the settings
    of the run in a folder, or of the first of several seeds there. Options that were given are
    kept. If there is no run, nothing changes.

    Args:
        said: returns whether an option was given, by its name.
    """
    runs = runs_in(root)
    if not runs:
        return method, options, request
    stored = _Stored(runs[0] / CONFIG)
    before: dict[str, Any] = {
        "stream": stored.get("stream", str),
        "net": stored.net(),
        "pretrained": stored.config.get("pretrained") is True,
        "per_class": stored.config.get("per_class"),
        "untold": stored.config.get("untold") is True,
        "width": stored.get("width", int),
        "rank": stored.get("rank", str),
        "seeded": stored.get("seeded", str | None),
        "device": stored.device(),
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
    """The first seed of runs in a folder and their number; they must be consecutive."""
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

    def net(self) -> str:
        value: str = self.get("net", str)
        try:
            check_net(value)
        except RankupError:
            expected = f"one of {', '.join(NETS)}, or a published network's name"
            raise no_setting(self.path, "net", value, expected) from None
        return value

    def device(self) -> Device:
        value = self.get("device", str)
        if value not in list(Device):
            raise no_setting(self.path, "device", value, f"one of {', '.join(Device)}")
        return Device(value)
