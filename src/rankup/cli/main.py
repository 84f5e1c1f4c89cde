"""The entry point of the command line: finds the command and turns errors into one sentence."""

import errno
import io
import os
import signal
import sys
import traceback
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any, NoReturn, TextIO

import typer
from typer.core import TyperGroup

from rankup.cli.options import in_paragraphs, offer_outside_options
from rankup.cli.progress import STOPPED
from rankup.cli.sentences import say
from rankup.distributed.torchrun import is_follower
from rankup.errors import RankupError, plain_warnings, want_of_memory

# In the order of `rankup --help`: each is the function of its name in the module of its name.
_OF_A_NETWORK = (
    *("learn", "predict", "test", "tasks", "new", "rename", "remove", "join", "diff", "export"),
    *("push", "pull", "serve", "info", "verify"),
)
_OF_RESEARCH = ("run", "compare", "tune", "paper", "report", "streams", "methods", "seal")
COMMANDS = (*_OF_A_NETWORK, *_OF_RESEARCH)


class Commands(TyperGroup):
    """Imports a command's module when the command is called or listed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: dict[str, Any] = dict.fromkeys(COMMANDS)  # their names, to list and suggest

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in COMMANDS:
            return None
        command = getattr(import_module(f"rankup.cli.{name}"), name)
        alone = typer.Typer(add_completion=False)
        panel = "A network's life" if name in _OF_A_NETWORK else "Research"
        alone.command(name, help=in_paragraphs(command), rich_help_panel=panel)(command)
        return typer.main.get_command(alone)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in COMMANDS:
            import_module(f"rankup.cli.{args[0]}")
            offer_outside_options(args[0])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    help="Networks that learn one task after another and never forget one.",
)

# Typer's error for invalid arguments. It does not export the class, whose home differs between
# releases.
_UsageError: Any = typer.BadParameter.__base__

# Errors of files and folders that the user names.
_OF_FOLDERS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EIO,
    errno.ENAMETOOLONG,
)


def _show_version(asked: bool) -> None:
    if asked:
        import rankup

        print(f"rankup {rankup.__version__}")
        raise typer.Exit


@app.callback()
def _always(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; bad input ends in one sentence and a non-zero exit."""
    plain_warnings()
    # Read when torch is loaded: waiting threads sleep. Else they keep a core busy, and if anything
    # else is running, a step takes several times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A closed one (`>&-`) is None: nobody wants its output.
    sys.stdout, sys.stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without "±" shows "?"
            stream.reconfigure(errors="replace")
    if is_follower():  # the first of torchrun's processes speaks for all, except of bugs
        sys.stdout = sys.stderr = _nowhere()
        sys.excepthook = lambda *error: traceback.print_exception(*error, file=sys.__stderr__)
    # Like Ctrl-C: schedulers and `timeout` stop jobs with it, and these should resume, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    words = sys.argv[1:] or ["--help"]
    try:
        try:
            code = app(words, prog_name="rankup", standalone_mode=False)
        finally:
            sys.stdout.flush()
    except RankupError as error:
        _end(str(error))
    except _UsageError as error:
        _end(_in_one_sentence(error, words), 2)
    except (KeyboardInterrupt, typer.Abort):  # some releases of typer turn Ctrl-C into Abort
        _end("stopped", STOPPED)
    except OSError as error:
        if error.filename is not None and error.errno in _OF_FOLDERS:
            _end(f"{error.filename} cannot be used: {error.strerror}")
        if error.filename is not None:  # whoever opened a file says so
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left to write
        if isinstance(error, BrokenPipeError):  # the reader has seen enough
            sys.exit(1)
        _end(f"the output cannot be written: {error.strerror}")
    except (MemoryError, RuntimeError) as error:
        if not (sentence := want_of_memory(error)):
            raise
        _end(sentence)
    if code == STOPPED:  # as others tell it; where there are bars, these say so and end the process
        _end("stopped", STOPPED)
    sys.exit(code)


def _nowhere() -> TextIO:
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _end(sentence: str, code: int = 1) -> NoReturn:
    say(f"rankup: {sentence}", sys.stderr)
    sys.exit(code)


def _in_one_sentence(error: Any, words: list[str]) -> str:
    """Typer's message about invalid input, with the word that was given."""
    message = " ".join(error.format_message().split()).rstrip(".")
    options = getattr(getattr(error, "param", None), "opts", ())
    tokens = [token for word in words for token in word.split("=", 1)]
    values = [value for option, value in pairwise(tokens) if option in options]
    got = "" if not values or repr(values[-1]) in message else f", got {values[-1]!r}"
    command = error.ctx.command_path if error.ctx else "rankup"
    return f"{message[:1].lower()}{message[1:]}{got} (see {command} --help)"
