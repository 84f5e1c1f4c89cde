"""The command line. Heavy imports happen inside the commands: `--help` is instant."""

import io
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from rankup.cli_compare import compare, show_comparison
from rankup.cli_options import (
    in_paragraphs,
    refuse_factors,
    refuse_if_not_begun,
    refuse_softness,
    was_said,
    with_method_options,
    with_request,
)
from rankup.cli_paper import paper
from rankup.cli_tune import tune
from rankup.errors import RankupError, plain_warnings, want_of_memory
from rankup.methods import METHODS
from rankup.methods import method_options as check_options
from rankup.request import Request

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    help="Networks that learn one task after another and never forget one.",
)

# What typer raises where it cannot take what was typed. It has no name of its own for it, and where
# it is defined differs between releases.
_UsageError: Any = typer.BadParameter.__base__

Plain = Annotated[bool, typer.Option("--plain", help="A name per line, for scripts.")]


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows no "±" shows "?"
            stream.reconfigure(errors="replace")
    # As Ctrl-C: a scheduler and `timeout` stop a job so, and it should go on from there, too.
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
    except typer.Abort:
        _end("stopped")
    except OSError as error:
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
    sys.exit(code)


def _end(sentence: str, code: int = 1) -> NoReturn:
    print(f"rankup: {sentence}", file=sys.stderr)
    sys.exit(code)


def _in_one_sentence(error: Any, words: list[str]) -> str:
    """What typer says of what it cannot take, with the word that was given."""
    said = " ".join(error.format_message().split()).rstrip(".")
    options = getattr(getattr(error, "param", None), "opts", ())
    apart = [part for word in words for part in word.split("=", 1)]
    given = [after for before, after in pairwise(apart) if before in options]
    got = "" if not given or repr(given[-1]) in said else f", got {given[-1]!r}"
    command = error.ctx.command_path if error.ctx else "rankup"
    return f"{said[:1].lower()}{said[1:]}{got} (see {command} --help)"


@app.command()
@with_method_options
@with_request
def run(
    ctx: typer.Context,
    method: Annotated[str, typer.Option(help="How; see `rankup methods`.")] = "rank",
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run's folder, else runs/STREAM-METHOD-SEED; of several seeds the folder of "
            "their folders, else runs/STREAM-METHOD."
        ),
    ] = None,
    *,
    request: Request,
    method_options: dict[str, Any],
) -> None:
    """Learn a stream task after task and show what was remembered.

    Without options: ten tasks of permuted digits on the CPU, within a minute. Writes a folder with
    config.json, metrics.jsonl, the network in net/ and a page, report.html. `--resume --out FOLDER`
    goes on as that run was begun; with more --tasks than before, a run of the rank update learns
    further permutations or rotations.
    """
    from rankup.begun import Asked, as_begun
    from rankup.folder import check_folder, tasks_more, tasks_of, write_config
    from rankup.launch import Launch
    from rankup.methods import method_class
    from rankup.methods.rank import warn_if_capped
    from rankup.progress import SeedBars, bars, note
    from rankup.replicas import run_seeds
    from rankup.run import setting_of
    from rankup.run_files import CONFIG, runs_in

    if request.resume and out:
        refuse_if_not_begun(ctx, "run", out, bool(runs_in(out)))
        before = Asked(method, method_options, request)
        asked_for = as_begun(before, out, partial(was_said, ctx))
        method, method_options, request = asked_for.method, asked_for.options, asked_for.request
    check_options(method, method_options)
    if method != "rank":
        refuse_factors(ctx, f"{method} has no factors")
    refuse_softness(ctx, method_options)
    seeds, name = request.seeds, f"{request.stream_name}-{method}"
    root = out or Path("runs") / (name if seeds > 1 else f"{name}-{request.seed}")
    if seeds > 1 and (root / CONFIG).exists():
        raise RankupError(f"{root} holds a run already, of one seed: name another with --out")
    if request.resume and request.tasks is None:  # only who says so wants more of them than before
        request = replace(request, tasks=tasks_of(_folders(root, request).values()))
    launch = Launch(request)
    folders = _folders(root, request)
    asked = launch.of(method, method_options, folders)
    setting = setting_of(asked[0].config, asked[0].stream())
    if method == "rank":  # here, because every process would say it
        warn_if_capped(setting)
    # All folders before the first seed begins: whoever goes on knows of all by them.
    method_class(method).check(setting)
    for each in asked:
        check_folder(each.config, each.out, each.resume)
    with bars() as shown:
        if request.resume and (more := max(tasks_more(each.config, each.out) for each in asked)):
            note(shown, f"{root} goes on to {launch.tasks} tasks, {more} more than before")
        show = SeedBars(shown, launch.tasks, seeds).show
        for each in asked:
            write_config(each.config, each.out)
        asked = [replace(each, resume=True) for each in asked]
        failures = run_seeds(asked, on_progress=show, note=partial(note, shown))
    whole = [each.out for each in asked if each.config.seed not in failures]
    if whole:
        _show(whole, root / "report.html")
    if failures:
        raise RankupError(_failed(failures, folders))


def _folders(root: Path, request: Request) -> dict[int, Path]:
    """Each seed's; that of a single one is the folder itself, unless it was begun among others."""
    found = {seed: root / f"seed-{seed}" for seed in request.all_seeds}
    alone = len(found) == 1 and not found[request.seed].exists()
    return {request.seed: root} if alone else found


def _failed(failures: dict[int, str], folders: dict[int, Path]) -> str:
    """Why the first of the seeds failed that did, and what is left of it."""
    seed, why = next(iter(failures.items()))
    which = f"seed {seed}: " if len(folders) > 1 else ""
    more = len(failures) - 1
    others = f" (and {more} more seed{'s' if more > 1 else ''} failed)" if more else ""
    net = folders[seed] / "net"
    left = f"what was learned before is whole in {net}, " if net.exists() else ""
    return f"{which}{why}{others}; {left}a new run with other settings needs another --out"


app.command()(compare)
app.command()(tune)
app.command(help=in_paragraphs(paper))(paper)


def _show(paths: list[Path], page: Path) -> None:
    """Write the page of one run or of several, and print their table: whichever of both cannot be
    written, the other is."""
    from rich.console import Console

    from rankup.progress import tell
    from rankup.report import comparison_table, is_comparison, read_run, run_table, write_report
    from rankup.report.page import checked_page
    from rankup.report.printing import print_table

    checked_page(page)
    if compared := next(filter(is_comparison, paths), None):
        raise RankupError(f"{compared} is a comparison, which is shown alone")
    runs = [read_run(path) for path in paths]
    console = Console()
    try:
        written = write_report(runs, page)
    finally:
        print_table(console, run_table(runs[0]) if len(runs) == 1 else comparison_table(runs))
    tell(console, f"A page with plots: {written}")


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Run folders, shown side by side, or a comparison's.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page, else report.html in the first folder.")
    ] = None,
) -> None:
    """Write a page about one run or several, or about a comparison, and print their table."""
    from rankup.report import is_comparison

    page = out or folders[0] / "report.html"
    folders = [run for folder in folders for run in _runs_to_show(folder)]
    if is_comparison(folders[0]) and len(folders) == 1:
        show_comparison(folders[0], page)
    else:
        _show(folders, page)


def _runs_to_show(folder: Path) -> list[Path]:
    """The folder, or of one that holds several seeds' runs those that have learned something."""
    from rankup.run_files import read_lines, runs_in

    runs = runs_in(folder) or [folder]
    learned = [run for run in runs if len(runs) == 1 or read_lines(run)]
    if 0 < len(learned) < len(runs):
        left_out = ", ".join(run.name for run in runs if run not in learned)
        print(f"rankup: {left_out}: nothing has been learned yet", file=sys.stderr)
    return learned or runs


@app.command()
def info(path: Annotated[Path, typer.Argument(help="A network's folder, or a run's.")]) -> None:
    """Say what a network is made of: its tasks, its layers, what it stores."""
    from rich.console import Console
    from rich.text import Text

    from rankup.manifest import Manifest
    from rankup.progress import tell
    from rankup.size import kept_from_module, stored_by_task
    from rankup.specs import FactoredSpec

    manifest = Manifest.read(_network(path))
    console = Console()
    rank = manifest.growth.rank
    tell(console, f"{manifest.model['model'] or manifest.model['class']}, {rank}")
    layers = _right_aligned("layer", "outputs", "inputs", "seeded", "first", "step")
    for spec in manifest.specs:
        if isinstance(spec, FactoredSpec):
            numbers = (spec.outputs, spec.inputs, spec.rank.seeded, spec.rank.first, spec.rank.step)
            layers.add_row(Text(spec.name), *map(str, numbers))
    console.print(layers)
    tasks = _right_aligned("task", "classes", "numbers stored", "bytes of file")
    counts = stored_by_task(manifest.specs, [task.classes for task, _ in manifest.tasks])
    for (task, file), count in zip(manifest.tasks, counts, strict=True):
        tasks.add_row(Text(task.name), str(task.classes), f"{count:,}", f"{file.size:,}")
    if base := manifest.base:
        kept = kept_from_module(manifest.specs)
        tasks.add_row("of the module", "", f"{kept:,}", f"{base.size:,}")
        counts = [*counts, kept]
    console.print(tasks)
    form = "" if manifest.growth.store == "full" else f" as {manifest.growth.store}"
    size = sum(file.size for _, file in manifest.tasks) + (base.size if base else 0)
    number = len(manifest.tasks)
    console.print(
        f"{number} task{'s' if number != 1 else ''}, {sum(counts):,} numbers stored{form} in "
        f"{size:,} bytes of files"
    )


def _right_aligned(first: str, *headings: str) -> "Table":
    from rich.table import Table

    table = Table(first, box=None)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


@app.command()
def verify(path: Annotated[Path, typer.Argument(help="A network's folder, or a run's.")]) -> None:
    """Check that a network is whole: every hash, shape and name. Exits with 1 if it is not."""
    from rankup.store import verify as check

    found = check(_network(path))
    print(found, file=sys.stdout if found else sys.stderr)
    if not found:
        raise typer.Exit(1)


def _network(path: Path) -> Path:
    from rankup.run_files import CONFIG, NET, read_config, runs_in

    if not path.exists():
        raise RankupError(f"there is no folder {path}")
    if not (path / CONFIG).exists():
        if runs := runs_in(path):
            raise RankupError(f"{path} holds {len(runs)} runs: name one of them, as {runs[0]}")
        return path
    if (method := read_config(path / CONFIG)["method"]) != "rank":
        raise RankupError(
            f"{path} is a run of {method}, only a run of rank has a network of factors"
        )
    return path / NET


@app.command()
def streams(plain: Plain = False) -> None:
    """List the streams that can be learned."""
    from rankup.data.streams import OWN, OWN_DESCRIPTION, STREAMS

    listed = {name: entry.description for name, entry in STREAMS.items()}
    _list(listed if plain else {**listed, f"{OWN}PATH": OWN_DESCRIPTION}, plain)


@app.command()
def methods(plain: Plain = False) -> None:
    """List the methods."""
    _list({name: info.help for name, info in METHODS.items()}, plain)


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
