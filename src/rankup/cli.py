"""The command line. Heavy imports happen inside the commands: `--help` is instant."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from rankup.cli_options import with_method_options, with_recipe_options
from rankup.errors import RankupError
from rankup.methods import METHODS, method_info
from rankup.methods import method_options as check_options
from rankup.recipe import RECIPES, recipe_for

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Networks that learn one task after another and never forget one.",
)

Plain = Annotated[bool, typer.Option("--plain", help="A name per line, for scripts.")]


class Net(StrEnum):
    mlp = "mlp"
    resnet18 = "resnet18"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def main() -> None:
    """Run the command line; bad input ends in one sentence and a non-zero exit."""
    try:
        app()
    except RankupError as error:
        print(f"rankup: {error}", file=sys.stderr)
        sys.exit(1)


@app.command()
@with_recipe_options
@with_method_options
def run(
    stream: Annotated[str, typer.Option(help="What to learn; see `rankup streams`.")] = "p-digits",
    method: Annotated[str, typer.Option(help="How; see `rankup methods`.")] = "rank",
    net: Annotated[Net, typer.Option(help="The network's architecture.")] = Net.mlp,
    width: Annotated[
        int | None, typer.Option(help="Hidden units (256), or ResNet18's channels (20).")
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option(
            help="Rank that the first and each later task adds: 11,1 (the MLP's) or as shares of "
            "a layer's outputs 0.1,0.02 (ResNet18's)."
        ),
    ] = None,
    seeded: Annotated[
        str | None,
        typer.Option(
            help="Seeded factors per layer: 256, or 1536,768 by layer, or 4x its outputs."
        ),
    ] = None,
    tasks: Annotated[int | None, typer.Option(help="How many tasks of the stream.")] = None,
    recipe: Annotated[
        str, typer.Option(help="; ".join(f"{name}: {what}" for name, what in RECIPES.items()))
    ] = "default",
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    seeds: Annotated[
        int, typer.Option(help="So many seeds from --seed on, trained together.", min=1)
    ] = 1,
    data: Annotated[
        Path | None, typer.Option(help="Where data sets are, else $RANKUP_DATA.")
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Get missing data.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run's folder, else runs/STREAM-METHOD-SEED; of several seeds the folder of "
            "their folders, else runs/STREAM-METHOD."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a stopped run.")] = False,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = Device.auto,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads on the CPU, else as many as help; several seeds have one each.", min=1
        ),
    ] = None,
    *,
    recipe_options: dict[str, Any],
    method_options: dict[str, Any],
) -> None:
    """Learn a stream task after task and show what was remembered.

    Without options: ten tasks of permuted digits on the CPU, within a minute. Writes a folder with
    config.json, metrics.jsonl, the network in net/ and a page, report.html.
    """
    chosen_options = check_options(method, method_options)
    recipe_for(recipe)  # refuses an unknown one before anything is loaded
    # What a GPU multiplies in several streams is the same every time only with this.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from rankup import run as runs
    from rankup.data.streams import make_stream
    from rankup.replicas import Seed, run_seeds

    rank = rank or ("11,1" if net is Net.mlp else "0.1,0.02")
    rule = runs.parse_rank(rank, seeded)
    if device is Device.cuda and not torch.cuda.is_available():
        raise RankupError("--device cuda was asked for, but torch sees no GPU")
    where = device.value
    if device is Device.auto:
        where = "cuda" if torch.cuda.is_available() else "cpu"
    made = make_stream(stream, tasks=tasks, seed=seed, data=data, download=download)
    shape = made[0].train_x.shape[1:]
    chosen = recipe_for(
        recipe,
        colour=len(shape) == 3 and shape[0] == 3,
        size=shape[-1],
        samples=len(made[0].train_y),
        net=net.value,
        learned=bool(rule.first),
        device=where,
    )
    chosen = replace(chosen, **{**method_info(method).recipe, **recipe_options})
    name = f"{stream.replace('/', '_')}-{method}"
    root = out or Path("runs") / (name if seeds > 1 else f"{name}-{seed}")
    asked = []
    for own in range(seed, seed + seeds):
        folder = root / f"seed-{own}" if seeds > 1 else root
        if own != seed:
            made = make_stream(stream, tasks=tasks, seed=own, data=data)
        config = runs.RunConfig(
            stream=stream,
            method=method,
            options=asdict(chosen_options),
            net=net.value,
            width=width or (256 if net is Net.mlp else 20),
            rank=rank,
            seeded=seeded,
            tasks=len(made),
            seed=own,
            device=where,
            threads=_threads(net, folder, resume, threads or (1 if seeds > 1 else None)),
            recipe={"name": recipe, **asdict(chosen)},
            task_names=[task.name for task in made],
            versions=runs.versions(),
        )
        # Processes make their streams themselves: sending one takes longer.
        keeps = seeds == 1 or where == "cuda"
        asked.append(Seed(config, data, folder, resume, made if keeps else None))
    if where == "cuda":  # The GPU leaves Python time to load what will draw the page.
        threading.Thread(target=import_module, args=("matplotlib.figure",), daemon=True).start()
    try:
        with _progress(len(made), seeds) as (on_progress, note):
            failures = run_seeds(asked, on_progress=on_progress, note=note)
    except KeyboardInterrupt:
        print("rankup: stopped; the same command with --resume goes on", file=sys.stderr)
        raise typer.Exit(130) from None
    whole = [each.out for each in asked if each.config.seed not in failures]
    if whole:
        _show(whole, root / "report.html")
    for own, why in failures.items():
        which = f"seed {own}: " if seeds > 1 else ""
        raise RankupError(
            f"{which}{why}; what was learned before is whole in "
            f"{asked[own - seed].out / 'net'}, a new run with other settings needs another --out"
        )


def _threads(net: Net, out: Path, resume: bool, asked: int | None) -> int:
    """For a run that goes on as many as it had, because bits depend on it. The steps of an MLP are
    too small for more than two."""
    import torch

    from rankup.report.runs import CONFIG, read_config

    if resume and (out / CONFIG).exists():
        return int(read_config(out / CONFIG)["threads"])
    most = torch.get_num_threads()
    return asked or (min(2, most) if net is Net.mlp else most)


@contextmanager
def _progress(tasks: int, seeds: int) -> Iterator[tuple[Callable[..., None], Callable[..., None]]]:
    """A bar for each seed that is being learned, and a way to say something beside them."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        lines: dict[int, Any] = {}
        if seeds == 1:
            lines[0] = bar.add_task("learning", total=tasks, state="")

        def on_progress(now: Any) -> None:
            seed = now.seed if seeds > 1 else 0
            if seed not in lines:
                lines[seed] = bar.add_task("", total=tasks, state="")
            which = f"{now.seeds} seeds, " if now.seeds > 1 else f"seed {seed}, "
            which = which if seeds > 1 else ""
            bar.update(
                lines[seed],
                description=f"{which}task {now.task + 1}/{tasks}, epoch {now.epoch}/{now.epochs}",
                completed=now.task + now.epoch / now.epochs,
                state=f"loss {now.loss:.3f}, {now.accuracy:.1%} right",
            )

        yield on_progress, lambda text: bar.console.print(f"rankup: {text}", soft_wrap=True)


def _show(paths: list[Path], page: Path) -> None:
    """Print the table of one run or of several, and write their page."""
    from rich.console import Console

    from rankup.report import comparison_table, read_run, run_table, write_report

    runs = [read_run(path) for path in paths]
    console = Console()
    console.print(run_table(runs[0]) if len(runs) == 1 else comparison_table(runs))
    console.print(f"A page with plots: {write_report(runs, page)}", soft_wrap=True)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, shown side by side.")],
    out: Annotated[
        Path | None, typer.Option(help="The page, else report.html in the first folder.")
    ] = None,
) -> None:
    """Write a page about one run or several, and print their table."""
    _show(folders, out or folders[0] / "report.html")


@app.command()
def info(path: Annotated[Path, typer.Argument(help="A network's folder, or a run's.")]) -> None:
    """Say what a network is made of: its tasks, its layers, what it stores."""
    from rich.console import Console
    from rich.table import Table

    from rankup.manifest import Manifest
    from rankup.size import stored_by_task
    from rankup.specs import FactoredSpec

    manifest = Manifest.read(_network(path))
    console = Console()
    rank = manifest.growth.rank
    console.print(f"{manifest.model['model'] or manifest.model['class']}, {rank}", soft_wrap=True)
    layers = Table("layer", "outputs", "inputs", "seeded", "first", "step", box=None)
    for spec in manifest.specs:
        if isinstance(spec, FactoredSpec):
            numbers = (spec.outputs, spec.inputs, spec.rank.seeded, spec.rank.first, spec.rank.step)
            layers.add_row(spec.name, *map(str, numbers))
    console.print(layers)
    tasks = Table("task", "classes", "numbers stored", box=None)
    counts = stored_by_task(manifest.specs, [task.classes for task, _ in manifest.tasks])
    for (task, _), count in zip(manifest.tasks, counts, strict=True):
        tasks.add_row(task.name, str(task.classes), f"{count:,}")
    console.print(tasks)
    console.print(f"{len(counts)} tasks, {sum(counts):,} numbers stored")


@app.command()
def verify(path: Annotated[Path, typer.Argument(help="A network's folder, or a run's.")]) -> None:
    """Check that a network is whole: every hash, shape and name. Exits with 1 if it is not."""
    from rankup.store import verify as check

    found = check(_network(path))
    print(found, file=sys.stdout if found else sys.stderr)
    if not found:
        raise typer.Exit(1)


def _network(path: Path) -> Path:
    return path / "net" if (path / "config.json").exists() else path


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
