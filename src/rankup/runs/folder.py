"""Writing a run's settings and metrics to its folder, and locking it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock

from rankup.data.streams import OWN, STREAMS, stream_info
from rankup.errors import RankupError
from rankup.methods import method_info
from rankup.runs.records import (
    CONFIG,
    METRICS,
    OF_A_SEED,
    is_sealed,
    read_config,
    sealed_lines,
    setting,
)
from rankup.storage.atomic import is_unfinished, utf8, write_file, write_json
from rankup.storage.seal import sealed

_LOCK = ".lock"  # stays behind

# Options that version 0.1 did not have, with the values that describe how it behaved.
_SINCE_VERSION_0_1 = {"uses": "all", "router": "", "prune": False, "tolerance": 1.0}
_RECIPE_SINCE_VERSION_0_1 = {"head": "drawn", "rotations": False, "views": 1}


class RunError(RankupError):
    """A run folder cannot be used."""


@dataclass(frozen=True)
class RunConfig:
    """The settings of a run, as written to `config.json`."""

    stream: str
    method: str
    options: dict[str, Any]  # the method's own
    net: str
    width: int
    rank: str
    seeded: str | None
    tasks: int
    seed: int
    device: str
    threads: int
    recipe: dict[str, Any]
    task_names: list[str]
    versions: dict[str, str]
    held_out: float = 0.0  # share of the training data used as test data
    data: str = ""  # checksum of the user's own data set
    tasks_in_stream: int | None = None  # if only the first of them are learned
    inputs: list[int] | None = None  # the shape of a sample
    pretrained: bool = False  # whether the network begins with published weights, and keeps them
    per_class: int | None = None  # the most training samples of a class
    preprocessing: dict[str, Any] | None = None  # how samples were made for a published network
    untold: bool = False  # whether it is also tested without telling the task

    def but_for_its_seed(self) -> str:
        """The settings shared by runs that differ only in their seeds."""
        rest = {k: v for k, v in asdict(self).items() if k not in OF_A_SEED}
        return json.dumps(rest, sort_keys=True)


def check_folder(config: RunConfig, out: Path, resume: bool) -> None:
    """Raise `RunError` if a run can neither begin nor continue in a folder."""
    path = out / CONFIG
    try:
        if path.exists() and not resume:
            raise RunError(f"{out} already holds a run: add --resume to continue it, or --out")
        if path.exists():
            _refuse_other(out, read_config(path), _as_stored(config))
        elif out.exists() and not out.is_dir():
            raise RunError(f"{out} is a file, not a folder: name a folder with --out")
        elif out.exists() and holds_anything(out):
            raise RunError(f"{out} holds other files: name a new folder with --out")
    except OSError as error:
        raise RunError(f"{out} cannot be read: {error.strerror}") from error


def holds_anything(folder: Path) -> bool:
    """Whether a folder has more than leftovers of a process that died before its run began."""
    return any(entry.name != _LOCK and not is_unfinished(entry) for entry in folder.iterdir())


def tasks_more(config: RunConfig, out: Path) -> int:
    """How many tasks the run in a folder is to learn besides those that it was begun with."""
    path = out / CONFIG
    if not path.exists():
        return 0
    stored = read_config(path)
    grows = _grows(stored, _as_stored(config))
    return len(config.task_names) - len(stored["task_names"]) if grows else 0


def tasks_of(folders: Iterable[Path]) -> int | None:
    """How many tasks the runs in these folders are to learn; None if there are no runs."""
    paths = (out / CONFIG for out in folders)
    stored = {path: read_config(path) for path in paths if path.exists()}
    wanted = sorted(
        {setting(path, config, "tasks", int, "a whole number") for path, config in stored.items()}
    )
    if len(wanted) > 1:
        raise RunError(
            f"these runs were started with {wanted[0]} to {wanted[-1]} tasks: say with --tasks "
            "how many all of them should learn"
        )
    return wanted[0] if wanted else None


@contextmanager
def working_in(folders: Iterable[Path]) -> Iterator[None]:
    """Inside, no other process works in these run folders."""
    with ExitStack() as held:
        for out in folders:
            try:
                held.enter_context(filelock.FileLock(out / _LOCK, timeout=0))
            except filelock.Timeout:
                raise RunError(
                    f"another process is using {out}: wait for it to finish, or name another "
                    "folder with --out"
                ) from None
            except OSError as error:
                raise RunError(
                    f"{out} cannot be locked: {error.strerror}; remove {out / _LOCK} if it is no "
                    "file"
                ) from error
        yield


def is_to_be_written(config: RunConfig, out: Path) -> bool:
    """Whether a run begins in a folder, or its settings change because it is resumed with more
    tasks or with its images moved."""
    if not (out / CONFIG).exists():
        return True
    stored, wanted = read_config(out / CONFIG), _as_stored(config)
    return _grows(stored, wanted) or _has_moved(stored, wanted)


def write_config(config: RunConfig, out: Path) -> None:
    write_configs({out: config})


def write_configs(configs: Mapping[Path, RunConfig]) -> None:
    """Make the folders of new runs, and write the settings of all runs whose config
    `is_to_be_written`; of none if another process works in one of the folders."""
    new = {out: config for out, config in configs.items() if is_to_be_written(config, out)}
    out = Path()
    try:
        for out in new:
            out.mkdir(parents=True, exist_ok=True)
        with working_in(new):
            for out, config in new.items():
                _write_settings(out, asdict(config) | {"versions": _versions(config, out)})
    except OSError as error:
        raise RunError(f"cannot write to {out}: {error.strerror}") from error


def _write_settings(out: Path, settings: dict[str, Any]) -> None:
    """Write a run's settings with a seal, unless it was begun without one."""
    path = out / CONFIG
    is_old = path.exists() and not is_sealed(out)
    write_json(path, settings if is_old else sealed(_as_read(settings)))


def _versions(config: RunConfig, out: Path) -> Any:
    """The versions that the run was begun with."""
    path = out / CONFIG
    return read_config(path).get("versions", config.versions) if path.exists() else config.versions


def other_torch(config: RunConfig, out: Path) -> list[str]:
    """The versions of torch with which the run in a folder was begun and resumed, in order; empty
    if the last of them is the current one."""
    path = out / CONFIG
    versions = read_config(path).get("versions") if path.exists() else None
    known = versions.get("torch") if isinstance(versions, dict) else None
    listed = known if isinstance(known, list) else [known]
    before = [version for version in listed if isinstance(version, str)]
    return [] if before[-1:] == [config.versions["torch"]] else before


def record_torch(config: RunConfig, out: Path) -> None:
    """Add the current version of torch to a run's settings if it is resumed with another one than
    before. The caller must hold the folder's lock."""
    before = other_torch(config, out)
    if not before:
        return
    stored = read_config(out / CONFIG)
    stored["versions"]["torch"] = [*before, config.versions["torch"]]
    try:
        _write_settings(out, stored)
    except OSError as error:
        raise RunError(f"cannot write to {out}: {error.strerror}") from error


def write_lines(out: Path, lines: list[dict[str, Any]]) -> None:
    """Write the lines of all tasks learned, with seals if the run has them."""
    if is_sealed(out):
        lines = sealed_lines(read_config(out / CONFIG), _as_read(lines))
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    try:
        write_file(out / METRICS, utf8(text))
    except OSError as error:
        raise RunError(
            f"cannot write to {out / METRICS}: {error.strerror or error}; run the same command "
            "with --resume to continue"
        ) from error


def _as_stored(config: RunConfig) -> dict[str, Any]:
    stored: dict[str, Any] = _as_read(asdict(config))
    return stored


def _as_read(data: Any) -> Any:
    """Data as they are after they were written as JSON and read, which is what seals cover."""
    return json.loads(json.dumps(data))


def _grows(stored: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether the wanted tasks are the stored ones and further ones. Never for split streams, which
    divide their classes differently among another number of tasks."""
    before, now = stored.get("task_names"), wanted["task_names"]
    return (
        isinstance(before, list)
        and method_info(wanted["method"]).open_ended
        and not _is_split(wanted["stream"])
        and len(before) < len(now)
        and before == now[: len(before)]
    )


def _is_split(stream: str) -> bool:
    return stream.startswith(OWN) or (stream in STREAMS and STREAMS[stream].kind == "split")


def _has_moved(stored: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether the user's own data set has another path. Its checksum is compared elsewhere."""
    before, now = stored["stream"], wanted["stream"]
    return (
        isinstance(before, str)
        and before != now
        and before.startswith(OWN)
        and now.startswith(OWN)
        and bool(stored.get("data"))
        and stream_info(before).side == stream_info(now).side
    )


def _refuse_other(out: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise `RunError` if a run cannot be resumed with the wanted settings."""
    may_differ = {"versions"}
    if _grows(stored, wanted):
        may_differ |= {"tasks", "task_names", "data"}  # the checksum is of all tasks
    if _has_moved(stored, wanted):
        may_differ.add("stream")
    # The checksum last, because another difference may be its cause.
    for name, now in sorted(wanted.items(), key=lambda item: item[0] == "data"):
        before = stored.get(name)
        if name == "options" and isinstance(before, dict):
            before = {k: v for k, v in _SINCE_VERSION_0_1.items() if k in now} | before
        if name == "recipe" and isinstance(before, dict):
            before = _RECIPE_SINCE_VERSION_0_1 | before
        if name == "options" and isinstance(before, dict) and before.get("teacher"):
            # Its folder may have moved; whether it has learned these tasks is checked elsewhere.
            before = before | {"teacher": now.get("teacher") or before["teacher"]}
        if name in may_differ or before == now:
            continue
        if name in ("pretrained", "untold") and before is None and now is False:  # not yet known
            continue
        if name in ("data", "inputs") and before is None:  # not stored when it was begun
            continue
        if name == "data":
            raise RunError(
                f"the images of {wanted['stream']} have changed since {out} was started: put the "
                "old ones back, or start a new run with --out"
            )
        what = "is a run" if name == "tasks" else "was started"
        raise RunError(
            f"{out} {what} with {_difference(name, before, now)}: continue with the same options, "
            "or start a new run with --out"
        )


def _difference(name: str, before: Any, now: Any) -> str:
    """The first difference between two settings, in words.

    >>> _difference("recipe", {"name": "default", "lr": 0.1}, {"name": "default", "lr": 0.2})
    'lr 0.1, not 0.2'
    """
    if isinstance(before, list) and isinstance(now, list):
        before = {f"{name} {number}": entry for number, entry in enumerate(before, 1)}
        now = {f"{name} {number}": entry for number, entry in enumerate(now, 1)}
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**now, **before}:
            one, other = before.get(key), now.get(key)
            if one != other:
                name, before, now = name if key == "name" else key, one, other
                break
    return f"{name} {in_words(before)}, not {in_words(now)}"


def in_words(value: Any) -> Any:
    """A setting as it appears in a sentence, even if it is unset."""
    return "left out" if value in (None, "") else value
