"""The registry of methods: the built-in ones, and those that other packages and files register.

No torch here: the command line lists the built-in methods before anything heavy is loaded.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from rankup.errors import RankupError
from rankup.methods.builtin import BUILTIN
from rankup.methods.info import DEFAULT_SEARCH, MethodInfo, Values
from rankup.methods.options import Options, check_options_class, option_fields
from rankup.training.recipe import Recipe

if TYPE_CHECKING:
    from rankup.methods.base import Method

GROUP = "rankup.methods"  # of entry points
VARIABLE = "RANKUP_METHODS"  # modules and .py files to import

MethodType = TypeVar("MethodType", bound="type[Method]")

METHODS = dict(BUILTIN)  # by name; those from outside are added
_imported: set[str] = set()  # plugins


def register(
    name: str,
    *,
    help: str,
    options: type[Options] = Options,
    search: Sequence[Sequence[Values]] = DEFAULT_SEARCH,
    recipe: Mapping[str, Any] = MappingProxyType({}),
    continual: bool = True,
    open_ended: bool = False,
) -> Callable[[MethodType], MethodType]:
    """Register a `Method` class; for the arguments see `MethodInfo`.

    >>> from rankup.methods.finetune import FineTune
    >>> @register("ewc", help="another one")
    ... class Mine(FineTune): ...
    Traceback (most recent call last):
    rankup.errors.RankupError: there is already a method 'ewc': give rankup.methods.registry.Mine \
another name
    """

    def add(method: MethodType) -> MethodType:
        info = MethodInfo(method, help, options, continual, open_ended, recipe, search)
        _check(name, info)
        if (other := METHODS.get(name)) and not _is_same(other.home, method):
            raise RankupError(
                f"there is already a method {name!r}: give "
                f"{method.__module__}.{method.__qualname__} another name"
            )
        METHODS[name] = info
        return method

    return add


def method_info(name: str) -> MethodInfo:
    """The entry of a method. Methods from outside are imported if it is not built in."""
    if name not in METHODS and name not in all_methods():
        raise RankupError(
            f"there is no method {name!r}, only {', '.join(METHODS)}; to add one, register its "
            f"class and name its module or file in {VARIABLE}"
        )
    return METHODS[name]


def method_class(name: str) -> "type[Method]":
    """The class of a method.

    >>> method_class("rank").__name__
    'RankUpdate'
    """
    home = method_info(name).home
    if not isinstance(home, str):
        return home
    module, _, attribute = home.partition(":")
    method: type[Method] = getattr(import_module(f"rankup.methods.{module}"), attribute)
    return method


def method_options(name: str, values: Mapping[str, Any]) -> Options:
    """A method's options; those not given take their defaults.

    >>> method_options("finetune", {"strength": 3})
    Traceback (most recent call last):
    rankup.errors.RankupError: 'strength' is not an option of finetune, which has none of its own
    """
    options = method_info(name).options
    known = [item.name for item in option_fields(options)]
    for key in values:
        if key not in known:
            names = ", ".join(known) or "none of its own"
            raise RankupError(f"{key!r} is not an option of {name}, which has {names}")
    return options(**values)


def all_methods() -> dict[str, MethodInfo]:
    """All methods, after importing those of installed packages and of RANKUP_METHODS."""
    for entry in entry_points(group=GROUP):
        _import(f"the entry point {entry.name!r} ({entry.value})", entry.load, entry.name)
    for item in re.split(f"[,{os.pathsep}]", os.environ.get(VARIABLE, "")):
        if place := item.strip():
            load: Callable[[str], Any] = _run_file if place.endswith(".py") else import_module
            _import(f"{place!r}, named in {VARIABLE},", partial(load, place))
    return METHODS


def _import(plugin: str, load: Callable[[], Any], name: str | None = None) -> None:
    """Import a plugin unless that was done before.

    Args:
        plugin: how error messages name it.
        load: imports it.
        name: the method that it must register, if any.
    """
    if plugin in _imported:
        return
    _imported.add(plugin)
    try:
        load()
        if name is not None and name not in METHODS:
            raise RankupError(f"it registers no method {name!r}")
    except Exception as error:
        _imported.discard(plugin)
        kind = "" if isinstance(error, RankupError) else f"{type(error).__name__}: "
        raise RankupError(f"{plugin} cannot be imported: {kind}{error}") from error


def _run_file(place: str) -> None:
    path = Path(place).resolve()
    if not path.is_file():
        raise RankupError("there is no such file")
    spec = importlib.util.spec_from_file_location(f"rankup_methods_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)


def _is_same(one: "str | type[Method]", other: "type[Method]") -> bool:
    """Whether both are the same class, imported twice or defined again in a notebook."""
    if isinstance(one, str):
        return False
    return one.__qualname__ == other.__qualname__ and _file_of(one) == _file_of(other)


def _file_of(method: "type[Method]") -> str:
    path = getattr(sys.modules.get(method.__module__), "__file__", None)
    return os.path.realpath(path) if path else method.__module__


def _check(name: str, info: MethodInfo) -> None:
    """Raise an error for an entry that the command line cannot offer."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) or name == "all":
        raise RankupError(f"a method's name must be of letters, digits and dashes, got {name!r}")
    check_options_class(name, info.options)
    try:
        Recipe(**info.recipe)
    except TypeError:
        raise RankupError(f"{name} overrides what no recipe has: {dict(info.recipe)}") from None
