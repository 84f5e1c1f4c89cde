"""Settings of methods: their defaults, and on top of them what `rankup tune` has chosen for the
stream and the network."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rankup.errors import RankupError
from rankup.methods.registry import method_info, method_options
from rankup.storage.seal import opened
from rankup.training.recipe import RECIPES, Recipe
from rankup.utils.files import read_regular

TUNED = Path(__file__).with_name("tuned")  # STREAM-NET/METHOD[-VARIANT].json
SEEDED = "-seeded"
# Streams for which nothing was tuned, and similar ones for which it was.
ALIKE = {"s-miniimagenet-resnet18": "s-cifar100-resnet18"}
_LARGEST = 1 << 26  # bytes of a file of settings


class Settings(NamedTuple):
    recipe: Mapping[str, Any]  # fields that differ from the recipe of the stream and the network
    options: Mapping[str, Any]  # the method's own that differ from their defaults


def settings_for(
    method: str, stream: str, net: str, recipe: str = "default", variant: str = ""
) -> Settings:
    """The settings of a method for a stream and a network; what the user asks for comes on top.

    Args:
        recipe: the name of a recipe, or a folder where `rankup tune` has left what it found.
        variant: the suffix for a variant of the method, from `variant_of`.

    >>> settings_for("rank", "s-digits", "mlp")
    Settings(recipe={}, options={})
    """
    overrides, case = dict(method_info(method).recipe), f"{stream}-{net}"
    if recipe in RECIPES and recipe != "default":
        return Settings(overrides, {})
    folder = TUNED / ALIKE.get(case, case) if recipe == "default" else Path(recipe)
    path = folder / f"{method}{variant}.json"
    # Without learned factors the recipe differs; that of small networks is much like large ones'.
    if variant != SEEDED and not path.exists():
        path = folder / f"{method}.json"
    if recipe != "default" and not path.exists():
        warnings.warn(
            f"{recipe} has no settings for {method}{variant}, so its defaults are used",
            stacklevel=2,
        )
    tuned = _chosen(path, method, as_tried=recipe != "default")
    return Settings(overrides | dict(tuned.recipe), tuned.options)


def tried_before(method: str, stream: str, net: str) -> list[tuple[dict[str, Any], float | None]]:
    """The settings among which those of `settings_for` were chosen, with what all of them were
    given, and how accurate each was, None if it failed; nothing if nothing was tuned."""
    case = f"{stream}-{net}"
    tuned = _read(TUNED / ALIKE.get(case, case) / f"{method}.json") or {}
    given = {name: v for name, v in tuned.get("given", {}).items() if name != "epochs"}
    return [
        ({**given, **trial["settings"]}, None if trial["failed"] else fmean(trial["accuracy"]))
        for trial in tuned.get("trials", [])
    ]


def variant_of(method: str, rank: str, options: Mapping[str, Any]) -> str:
    """The suffix that settings files add to a method's name for a variant of it: without learned
    factors, or with networks of low rank.

    >>> variant_of("rank", "0,0", {}), variant_of("parallel", "11,1", {"size": "2"})
    ('-seeded', '-rank-2')
    >>> variant_of("rank", "11,1", {}), variant_of("parallel", "11,1", {"size": "full"})
    ('', '')
    """
    if method == "rank" and not any(map(float, rank.split(","))):
        return SEEDED
    size = options.get("size", "full") if method == "parallel" else "full"
    return "" if size == "full" else f"-rank-{size}"


def apart(chosen: Mapping[str, Any]) -> Settings:
    """Which of the settings are the recipe's, and which are a method's own.

    >>> apart({"lr": 0.1, "strength": 3.0})
    Settings(recipe={'lr': 0.1}, options={'strength': 3.0})
    """
    in_recipe = {item.name for item in fields(Recipe)}
    return Settings(
        recipe={name: value for name, value in chosen.items() if name in in_recipe},
        options={name: value for name, value in chosen.items() if name not in in_recipe},
    )


def base_recipe(recipe: str) -> str:
    """The name of the recipe that settings come on top of.

    >>> base_recipe("paper")
    'paper'
    """
    if recipe in RECIPES:
        return recipe
    if not any(Path(recipe).glob("*.json")):
        raise RankupError(
            f"there is no recipe {recipe!r}, only {', '.join(RECIPES)}, or a folder written by "
            "`rankup tune`"
        )
    return "default"


def _read(path: Path) -> dict[str, Any] | None:
    """What a file written by `rankup tune` says; None if there is none."""
    try:
        return opened(json.loads(read_regular(path, _LARGEST)), path, path)[0]
    except FileNotFoundError:
        return None
    except RankupError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        raise _no_settings(path) from None


def _chosen(path: Path, method: str, as_tried: bool) -> Settings:
    """What was chosen, and what all trials were given; nothing if nothing was tuned.

    Args:
        as_tried: whether to take the trials' epochs and batch size, too. What comes with this
            project is also used with more of them.
    """
    tuned = _read(path)
    if tuned is None:
        return Settings({}, {})
    try:
        given = dict(tuned.get("given", {}))
        given.pop("epochs", None)
        if as_tried:
            given = {name: tuned[name] for name in ("epochs", "batch") if name in tuned} | given
        chosen = apart(given | tuned["chosen"])
        Recipe(**chosen.recipe)
        method_options(method, chosen.options)
    except RankupError as error:
        raise RankupError(f"{path}: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _no_settings(path) from None
    return chosen


def _no_settings(path: Path) -> RankupError:
    return RankupError(f"{path} is not a settings file written by `rankup tune`")
