"""What can be asked of a network's folder: `rankup info`, `rankup verify`, `rankup predict`."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankup.errors import RankupError

if TYPE_CHECKING:
    from rich.table import Table


def info(path: Annotated[Path, typer.Argument(help="A network's folder, or a run's.")]) -> None:
    """Show what a network is made of: its tasks, its layers and what it stores."""
    from rich.console import Console
    from rich.text import Text

    from rankup.cli.progress import tell
    from rankup.layers.spec import FactoredSpec
    from rankup.net.size import kept_from_module, stored_by_task
    from rankup.report.printing import print_table
    from rankup.storage.manifest import Manifest

    manifest = Manifest.read(_network(path))
    console = Console()
    rank = manifest.options.rank
    tell(console, f"{manifest.model['model'] or manifest.model['class']}, {rank}")
    layers = _right_aligned("layer", "outputs", "inputs", "seeded", "first", "step")
    for spec in manifest.specs:
        if isinstance(spec, FactoredSpec):
            numbers = (spec.outputs, spec.inputs, spec.rank.seeded, spec.rank.first, spec.rank.step)
            layers.add_row(Text(spec.name), *map(str, numbers))
    print_table(console, layers)
    tasks = _right_aligned("task", "classes", "numbers stored", "bytes of file")
    counts = stored_by_task(manifest.specs, [task.classes for task, _ in manifest.tasks])
    for (task, file), count in zip(manifest.tasks, counts, strict=True):
        tasks.add_row(Text(task.name), str(task.classes), f"{count:,}", f"{file.size:,}")
    if base := manifest.base:
        kept = kept_from_module(manifest.specs)
        tasks.add_row("of the module", "", f"{kept:,}", f"{base.size:,}")
        counts = [*counts, kept]
    print_table(console, tasks)
    form = "" if manifest.options.store == "full" else f" as {manifest.options.store}"
    size = sum(file.size for _, file in manifest.tasks) + (base.size if base else 0)
    number = len(manifest.tasks)
    console.print(
        f"{number} task{'s' if number != 1 else ''}, {sum(counts):,} numbers stored{form} in "
        f"{size:,} bytes of files"
    )


def _right_aligned(first: str, *headings: str) -> "Table":
    from rich.table import Table

    table = Table(box=None)
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def verify(path: Annotated[Path, typer.Argument(help="A network's folder, or a run's.")]) -> None:
    """Check that a network is whole: every hash, shape and name. Exits with 1 if it is not."""
    from rankup.storage.store import verify as check

    found = check(_network(path))
    print(found, file=sys.stdout if found else sys.stderr)
    if not found:
        raise typer.Exit(1)


def predict(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    files: Annotated[list[Path], typer.Argument(metavar="IMAGES", help="Files of images.")],
    task: Annotated[
        str | None,
        typer.Option(help="Task, by name or number; needed if there are several."),
    ] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="Lines of file, class and probability between tabs, for scripts."
        ),
    ] = False,
) -> None:
    """Say which class of a task images belong to, by the network of a run that split its classes.

    Images are converted to the size and kind of pixels that the run learned from.
    """
    from rich.console import Console
    from rich.text import Text

    from rankup.runs.predict import what_is_seen

    if _network(path) == path:
        raise RankupError(
            f"{path} is not a run folder, and only that says what images its network was taught"
        )
    seen = what_is_seen(path, task, files)
    if plain:
        for file, (first, *_) in zip(files, seen, strict=True):
            _write_line(str(file), first.name, f"{first.probability:.4f}")
        return
    table = _right_aligned("image", "%")
    table.add_column("class")
    table.add_column("or else")
    for file, (first, second, *_) in zip(files, seen, strict=True):
        others = f"{second.name} ({100 * second.probability:.1f})"
        share = f"{100 * first.probability:.1f}"
        table.add_row(Text(str(file)), share, Text(first.name), Text(others))
    Console().print(table)


def _write_line(*cells: str) -> None:
    """Cells between tabs, with the bytes of names that are no text. Backslashes stand before what
    would end a cell."""
    line = "\t".join(
        cell.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n") for cell in cells
    )
    sys.stdout.buffer.write(os.fsencode(f"{line}\n"))


def _network(path: Path) -> Path:
    from rankup.runs.records import CONFIG, NET, read_config, runs_in

    if not path.exists():
        raise RankupError(f"there is no folder {path}")
    if not (path / CONFIG).exists():
        if runs := runs_in(path):
            raise RankupError(f"{path} holds {len(runs)} runs: name one of them, such as {runs[0]}")
        return path
    if (method := read_config(path / CONFIG)["method"]) != "rank":
        raise RankupError(
            f"{path} is a run of {method}, but only a run of rank has a network of factors"
        )
    return path / NET
