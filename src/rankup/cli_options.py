"""Options of the command line that come from dataclasses: a recipe's fields, methods' own."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from typing import Annotated, Any

import typer

from rankup.methods import METHODS
from rankup.recipe import Recipe

_RECIPE = "Recipe: what is left out comes from --method and --recipe"
_METHODS = "Methods' own options"


def with_recipe_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every field of a recipe, in place of its `recipe_options`: a
    dict of those that were given."""
    return _with_fields(
        command, "recipe_options", {f.name: _parameter(f, _RECIPE) for f in fields(Recipe)}
    )


def with_method_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every field of every method's options, in place of its
    `method_options`: a dict of those that were given."""
    return _with_fields(
        command,
        "method_options",
        {
            name: _parameter(item, _METHODS, f"{', '.join(methods)}: {item.metadata['help']}")
            for name, (item, methods) in _method_fields().items()
        },
    )


def _method_fields() -> dict[str, tuple[Field[Any], list[str]]]:
    """The fields of all methods' options by name, each with the methods that have it."""
    found: dict[str, tuple[Field[Any], list[str]]] = {}
    for method, info in METHODS.items():
        for item in fields(info.options):
            found.setdefault(item.name, (item, []))[1].append(method)
    return found


def _parameter(item: Field[Any], panel: str, help: str | None = None) -> inspect.Parameter:
    kind: Any = type(item.default)
    flag = item.name.replace("_", "-")
    option = typer.Option(
        f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}",
        help=help or item.metadata["help"],
        rich_help_panel=panel,
        show_default=False,
    )
    return inspect.Parameter(
        item.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _with_fields(
    command: Callable[..., None], instead_of: str, added: dict[str, inspect.Parameter]
) -> Callable[..., None]:
    def own() -> Iterator[inspect.Parameter]:
        for parameter in inspect.signature(command).parameters.values():
            if parameter.name != instead_of:
                yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)

    def wrapped(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in added}
        arguments[instead_of] = {name: v for name, v in given.items() if v is not None}
        command(**arguments)

    wrapped.__signature__ = inspect.Signature([*own(), *added.values()])  # type: ignore[attr-defined]
    wrapped.__doc__, wrapped.__name__ = command.__doc__, command.__name__
    return wrapped
