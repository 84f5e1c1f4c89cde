"""Tables and figures on the terminal, and all of them on one page."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from rich.console import Console

from rankup.errors import RankupError
from rankup.paper import experiments_of
from rankup.paper.plots import Figure
from rankup.paper.results import Results
from rankup.paper.tables import Table, markdown, rich_tables
from rankup.paper.timings import waits
from rankup.report.figures import THEMES
from rankup.report.tables import print_line, print_note, print_table
from rankup.report.text import plain
from rankup.storage.atomic import write_file

_INTRODUCTION = (
    "Written by `rankup paper`, nothing by hand. Figures are means ± standard deviations over "
    "seeds, beside the paper's own and the difference; parameters and replay buffers are in "
    "float32 numbers. A name links to the raw numbers: every seed's accuracy matrix, its settings, "
    "the date, the machine, the versions and the command. *not run* means that it has not been."
)
_NOTHING = "Nothing of it has been run."
PICTURES = "figures"  # the folder of pictures, inside the results


def show_parts(parts: Mapping[str, Table | Figure], results: Results) -> None:
    console = Console()
    for name, part in parts.items():
        if isinstance(part, Figure):
            try:
                written = part.write(name, results, results.root / PICTURES)
            except OSError as error:  # tables can still be shown
                where = results.root / PICTURES
                print_line(
                    Console(stderr=True), f"rankup: {where} cannot be written: {error.strerror}"
                )
                continue
            for each in written:
                path = results.root / PICTURES / f"{each}.png"
                print_line(console, f"{part.title}: {path}")
            if not written:
                console.print(f"{part.title}: nothing that it shows was run")
        else:
            for table in rich_tables(part, results):
                print_table(console, table)
        if part.differs:
            print_note(console, part.differs)


def write_page(parts: Mapping[str, Table | Figure], results: Results, page: Path) -> None:
    """A Markdown page with all tables, and pictures beside it."""
    text = ["# Results", "", _INTRODUCTION, "", *_machines(parts, results)]
    for name, part in parts.items():
        text += ["", f"## {part.title}", "", f"`rankup paper {name}`"]
        if not any(results.of(experiment) for experiment in part.experiments()):
            text += ["", _NOTHING]  # instead of tables of "not run"
            continue
        text += ["", part.differs] if part.differs else []
        if isinstance(part, Figure):
            for each in _pictures(name, part, results, page.parent / page.stem):
                names = (f"{page.stem}/{each}{theme.suffix}.png" for theme in THEMES)
                light, dark = map(quote, names)
                text += [
                    "",
                    f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
                    f'<img alt="{part.title}" src="{light}"></picture>',
                ]
        else:
            text += ["", markdown(part, results, page)]
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        write_file(page, "\n".join([*text, ""]).encode())
    except OSError as error:
        raise RankupError(f"{page} cannot be written: {error.strerror}") from error


def _pictures(name: str, figure: Figure, results: Results, folder: Path) -> list[str]:
    """Write a figure's pictures beside the page; return their names."""
    try:
        return figure.write(name, results, folder)
    except OSError as error:
        raise RankupError(
            f"the pictures' folder {folder} cannot be written: {error.strerror}"
        ) from error


def _machines(parts: Mapping[str, Table | Figure], results: Results) -> list[str]:
    """How many runs there are, by machine and version."""
    experiments = experiments_of(parts.values())
    measured = [results.of(experiment) for experiment in experiments]
    runs = [run for each in measured if each for run in each.runs]
    where = Counter(
        (run.machine, plain(run.config.get("versions", {}).get("torch", "unknown"))) for run in runs
    )
    dates = {run.date for run in runs}
    if not runs:
        return [_NOTHING]
    when = " to ".join(sorted({min(dates), max(dates)}))
    lines = [f"- {n:,} on {machine}, torch {torch}" for (machine, torch), n in where.most_common()]
    failed = sum(len(results.failures(experiment)) for experiment in experiments)
    also = f" and {failed} that failed" if failed else ""
    text = [f"{len(runs):,} runs{also}, {when}:", "", *lines]
    took = waits(results.root, experiments)
    return [*text, "", " ".join(took)] if took else text
