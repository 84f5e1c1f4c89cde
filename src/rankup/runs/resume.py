"""What a run was begun with, so that it need not be repeated to resume it."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from rankup.errors import RankupError
from rankup.runs.records import (
    CONFIG,
    no_setting,
    read_config,
    runs_in,
    setting,
)
from rankup.runs.request import Device, Net, Request
from rankup.training.recipe import Recipe

Choice = TypeVar("Choice", Net, Device)


@dataclass(frozen=True)
class Asked:
    """What `rankup run` is asked for."""

    method: str
    options: dict[str, Any]  # the method's own that were given
    request: Request


def as_begun(asked: Asked, root: Path, said: Callable[[str], bool]) -> Asked:
    """What was asked for, with everything not given taken from the run in that folder, or from the
    first of several seeds there. If there is none, nothing changes.

    Args:
        said: whether an option was given, by its name.
    """
    runs = runs_in(root)
    if not runs:
        return asked
    stored, request = _Stored(runs[0] / CONFIG), asked.request
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
    method = asked.method if said("method") else stored.get("method", str)
    options = asked.options
    if method == stored.get("method", str):
        options = stored.get("options", dict) | options
    return Asked(method, options, request)


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
