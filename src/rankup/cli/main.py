"""The command line. Heavy imports happen inside the commands: `--help` is instant."""

import errno
import io
import os
import signal
import sys
from itertools import pairwise
from typing import Annotated, Any, NoReturn, TextIO

import typer

from rankup.cli.compare import compare
from rankup.cli.network import info, predict, verify
from rankup.cli.options import in_paragraphs, offer_outside_options
from rankup.cli.paper import paper
from rankup.cli.progress import STOPPED
from rankup.cli.report import report
from rankup.cli.run import run
from rankup.cli.tune import tune
from rankup.errors import RankupError, plain_warnings, want_of_memory
from rankup.methods import all_methods

app = typer.Typer(
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    help="Networks that learn one task after another and never forget one.",
)

# What typer raises for invalid arguments. It does not export the class, and where that is defined
# differs between releases.
_UsageError: Any = typer.BadParameter.__base__

# What may be wrong with files and folders that the user names.
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

Plain = Annotated[bool, typer.Option("--plain", help="One name per line, for scripts.")]


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
    # Like Ctrl-C: schedulers and `timeout` stop jobs with it, and these should resume, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    words = sys.argv[1:] or ["--help"]
    try:
        try:
            offer_outside_options(words[0])
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
    print(f"rankup: {sentence}", file=sys.stderr)
    sys.exit(code)


def _in_one_sentence(error: Any, words: list[str]) -> str:
    """Typer's message about invalid input, with the word that was given."""
    said = " ".join(error.format_message().split()).rstrip(".")
    options = getattr(getattr(error, "param", None), "opts", ())
    apart = [part for word in words for part in word.split("=", 1)]
    given = [after for before, after in pairwise(apart) if before in options]
    got = "" if not given or repr(given[-1]) in said else f", got {given[-1]!r}"
    command = error.ctx.command_path if error.ctx else "rankup"
    return f"{said[:1].lower()}{said[1:]}{got} (see {command} --help)"


app.command()(run)
app.command()(compare)
app.command()(tune)
app.command(help=in_paragraphs(paper))(paper)
app.command()(report)
app.command()(info)
app.command()(verify)
app.command()(predict)


@app.command()
def streams(plain: Plain = False) -> None:
    """List the streams that can be learned."""
    from rankup.data.streams import OWN, OWN_DESCRIPTION, STREAMS

    listed = {name: entry.description for name, entry in STREAMS.items()}
    _list(listed if plain else {**listed, f"{OWN}PATH": OWN_DESCRIPTION}, plain)


@app.command()
def methods(plain: Plain = False) -> None:
    """List the methods."""
    _list({name: entry.help for name, entry in all_methods().items()}, plain)


def _list(entries: dict[str, str], plain: bool) -> None:
    if plain:
        print("\n".join(entries))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False)
    for name, help in entries.items():
        table.add_row(name, help)
    Console().print(table)
