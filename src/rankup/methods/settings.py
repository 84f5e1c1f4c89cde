"""Settings of methods: their defaults, overridden by those that `rankup tune` has chosen for the
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
# Cases without tuned settings of their own, and similar ones whose settings they use.
ALIKE = {"s-miniimagenet-resnet18": "s-cifar100-resnet18"}
_LARGEST = 1 << 26  # bytes of a file of settings


class Settings(NamedTuple):
    """A method's settings that differ from the defaults.

    Attributes:
        recipe: fields of the recipe.
        options: the method's own options.
    """

    recipe: Mapping[str, Any]
    options: Mapping[str, Any]


def settings_for(
    method: str, stream: str, net: str, recipe: str = "default", variant: str = ""
) -> Settings:
    """The settings of a method for a stream and a network, which options of the user override.

    Args:
        recipe: the name of a recipe, or a folder that `rankup tune` has written.
        variant: the suffix for a variant of the method, from `variant_of`.

    >>> settings_for("rank", "s-digits", "mlp")
    Settings(recipe={}, options={})
    """
    overrides, case = dict(method_info(method).recipe), f"{stream}-{net}"
    if recipe in RECIPES and recipe != "default":
        return Settings(overrides, {})
    folder = TUNED / ALIKE.get(case, case) if recipe == "default" else Path(recipe)
    path = folder / f"{method}{variant}.json"
    # Variants use the method's settings, except for seeded factors alone, which need others.
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
    """The trials among which the settings of `settings_for` were chosen: the settings of each,
    including those that all had in common, and its mean accuracy, None if it failed. Empty if
    nothing was tuned."""
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
    """Split settings into fields of the recipe and a method's own options.

    >>> apart({"lr": 0.1, "strength": 3.0})
    Settings(recipe={'lr': 0.1}, options={'strength': 3.0})
    """
    in_recipe = {item.name for item in fields(Recipe)}
    return Settings(
        recipe={name: value for name, value in chosen.items() if name in in_recipe},
        options={name: value for name, value in chosen.items() if name not in in_recipe},
    )


def base_recipe(recipe: str) -> str:
    """The name of the recipe that settings override.

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
    """The content of a file written by `rankup tune`; None if there is no such file."""
    try:
        return opened(json.loads(read_regular(path, _LARGEST)), path, path)[0]
    except FileNotFoundError:
        return None
    except RankupError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        raise _no_settings(path) from None


def _chosen(path: Path, method: str, as_tried: bool) -> Settings:
    """The chosen settings and those that all trials had in common; empty if nothing was tuned.

    Args:
        as_tried: whether to take the trials' epochs and batch size, too. Settings that come with
            this project are also used with others.
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
