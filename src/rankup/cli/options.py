"""Options of the command line that come from dataclasses: a request, a recipe, methods' options."""

import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from rankup.data.streams import STREAMS
from rankup.errors import RankupError
from rankup.methods.options import option_fields
from rankup.methods.registry import METHODS, all_methods
from rankup.runs.request import NETS, PUBLISHED, Request, check_net
from rankup.training.recipe import RECIPES, Recipe

_RECIPE = "Recipe (defaults come from the method and --recipe)"
_METHODS = "Methods' own options (with defaults where nothing was tuned)"


def one_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """A shell's offers for a name that was begun, or for the last of several with commas.

    >>> one_of(["rank", "replay", "ewc"])("r"), one_of(["rank", "ewc"])("rank,e")
    (['rank', 'replay'], ['rank,ewc'])
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, begun = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names if name.startswith(begun)]

    return complete


def _known_net(net: str) -> str:
    try:
        check_net(net)
    except RankupError as error:
        raise typer.BadParameter(str(error)) from None
    return net


# Options for fields of a request; the other fields are set by options of their own.
_ASKED: dict[str, Any] = {
    "stream": typer.Option(
        help="What to learn; see `rankup streams`.", autocompletion=one_of(STREAMS)
    ),
    "net": typer.Option(
        help="The network: mlp, resnet18, timm:NAME or, of transformers, hf:NAME_OR_PATH.",
        metavar="NET",
        callback=_known_net,
        autocompletion=one_of([*NETS, *PUBLISHED]),
    ),
    "pretrained": typer.Option(
        "--pretrained", help="Begin with the weights that come with --net, and keep them."
    ),
    "width": typer.Option(help="Hidden units (256), or ResNet18's channels (20).", min=1),
    "rank": typer.Option(
        help="Rank added by the first and each later task: 11,1 (the MLP's) or, as shares of "
        "a layer's outputs, 0.1,0.02 (ResNet18's)."
    ),
    "seeded": typer.Option(
        help="Seeded factors per layer: 256, or 1536,768 by layer, or 4x its outputs."
    ),
    "tasks": typer.Option(help="Number of tasks in the stream."),
    "per_class": typer.Option(help="Most training samples of a class, else all.", min=1),
    "recipe": typer.Option(
        help=", ".join(f"{name} ({what})" for name, what in RECIPES.items())
        + ", or a folder written by `rankup tune`",
        autocompletion=one_of(RECIPES),
    ),
    "seed": typer.Option(help="Seed of everything random."),
    "seeds": typer.Option(help="Number of seeds from --seed on, trained together.", min=1),
    "data": typer.Option(help="Folder of data sets, else $RANKUP_DATA."),
    "untold": typer.Option("--untold", help="Also test without telling which task it is."),
    "download": typer.Option("--download", help="Download missing data."),
    "resume": typer.Option("--resume", help="Continue what was stopped."),
    "device": typer.Option(help="Where to compute."),
    "on": typer.Option(
        metavar="ray|ray://HOST:PORT",
        help="Run on a Ray cluster: a local one, or the one that is named here or by RAY_ADDRESS.",
    ),
    "threads": typer.Option(
        help="CPU threads, else as many as help; several seeds get one each.",
        min=1,
        max=1024,
    ),
}


def was_given(ctx: typer.Context, option: str) -> bool:
    """Whether an option was given, by its name."""
    source = ctx.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def refuse_factors(ctx: typer.Context, why: str) -> None:
    """Refuse options of factors, where nothing has any."""
    for option in ("rank", "seeded", "selectors", "factors", "first_factors"):
        if was_given(ctx, option):
            name = option.replace("_", "-")
            raise RankupError(f"--{name} is for the method rank, {why}")


def refuse_softness(ctx: typer.Context, method_options: Mapping[str, Any]) -> None:
    """Refuse to soften a teacher's answers where there is none."""
    if was_given(ctx, "softness") and not method_options.get("teacher"):
        raise RankupError("--softness is for learning from a teacher: name one with --teacher")


def refuse_if_not_begun(ctx: typer.Context, what: str, out: Path, is_there: bool) -> None:
    """Refuse to go on where there is nothing, unless more was said of what it is to be: then it
    may begin."""
    how = {"resume", "out", "data", "download", "device", "threads", "on"}
    if not is_there and not any(was_given(ctx, name) for name in ctx.params.keys() - how):
        raise RankupError(f"there is no {what} in {out} to continue")


def with_request(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a `Request` and one for every field of a recipe, in place of
    its `request`."""
    items = {item.name: item for item in fields(Request)}
    shared = {
        name: _keyword(name, items[name].type, option, items[name].default)
        for name, option in _ASKED.items()
    }
    recipe = {item.name: _parameter(item, _RECIPE) for item in fields(Recipe)}

    def wrapped(**arguments: Any) -> None:
        asked = {name: arguments.pop(name) for name in shared}
        chosen = {name: arguments.pop(name) for name in recipe}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        command(**arguments, request=Request(**asked, recipe_options=chosen))

    return _signed(wrapped, command, "request", [*shared.values(), *recipe.values()])


def with_method_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every field of every method's options, in place of its
    `method_options`: a dict of those that were given."""

    def wrapped(**arguments: Any) -> None:
        values = {name: arguments.pop(name, None) for name in _method_fields()}
        options = {name: value for name, value in values.items() if value is not None}
        command(**arguments, method_options=options)

    def sign() -> None:
        taken = inspect.signature(command).parameters
        _signed(wrapped, command, "method_options", _method_parameters(taken))

    sign()
    _signs[command.__name__] = sign
    return wrapped


_signs: dict[str, Callable[[], None]] = {}  # by command: let it have all methods' options


def offer_outside_options(command: str) -> None:
    """Import the methods of other packages and files, and give a command their options, too."""
    if sign := _signs.get(command):
        all_methods()
        sign()


def _method_parameters(taken: Container[str]) -> Iterator[inspect.Parameter]:
    for name, (item, methods) in _method_fields().items():
        names, flag = ", ".join(methods), name.replace("_", "-")
        if name in taken:
            raise RankupError(f"--{flag} is an option of the command: rename that of {names}")
        if len(kinds := {type(value).__name__ for value in methods.values()}) > 1:
            raise RankupError(f"--{flag} has one type in all methods, not {kinds} ({names})")
        help = item.metadata.get("help", "")
        yield _parameter(item, _METHODS, f"{_defaults(methods)}: {help}")


def _method_fields() -> dict[str, tuple[Field[Any], dict[str, Any]]]:
    """The fields of all methods' options by name, each with the methods that have it and their
    defaults."""
    items: dict[str, tuple[Field[Any], dict[str, Any]]] = {}
    for method, info in METHODS.items():
        for item in option_fields(info.options):
            items.setdefault(item.name, (item, {}))[1][method] = item.default
    return items


def _defaults(methods: Mapping[str, Any]) -> str:
    """Methods with what an option is for them where nobody says it.

    >>> _defaults({"ewc": 100.0, "hat": 0.75}), _defaults({"rank": True}), _defaults({"rank": ""})
    ('ewc (100), hat (0.75)', 'rank (yes)', 'rank')
    """

    def text(value: Any) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return value if isinstance(value, str) else f"{value:g}"

    named = ((method, text(value)) for method, value in methods.items())
    return ", ".join(f"{method} ({value})" if value else method for method, value in named)


def _parameter(item: Field[Any], panel: str, help: str | None = None) -> inspect.Parameter:
    kind: Any = type(item.default)
    flag = item.name.replace("_", "-")
    choices = get_args(item.type) if get_origin(item.type) is Literal else ()
    option = typer.Option(
        f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}",
        metavar=f"<{'|'.join(choices)}>" if choices else None,
        help=help or item.metadata["help"],
        rich_help_panel=panel,
        show_default=False,
    )
    return _keyword(item.name, kind | None, option, None)


def _keyword(name: str, kind: Any, option: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


def in_paragraphs(command: Callable[..., None]) -> str:
    """A command's help without the lines' ends inside a paragraph, which a terminal of another
    width would keep."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _signed(
    wrapped: Callable[..., None],
    command: Callable[..., None],
    instead_of: str,
    added: Iterable[inspect.Parameter],
) -> Callable[..., None]:
    """Let a function look like a command that has parameters in place of one of its own."""

    def parameters() -> Iterator[inspect.Parameter]:
        for parameter in (*inspect.signature(command).parameters.values(), *added):
            if parameter.name != instead_of:
                yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)

    wrapped.__signature__ = inspect.Signature(list(parameters()))  # type: ignore[attr-defined]
    wrapped.__doc__, wrapped.__name__ = in_paragraphs(command), command.__name__
    return wrapped
