"""Tables and figures on the terminal, and all of them on one page."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from rankup.errors import RankupError
from rankup.paper.plots import Figure
from rankup.paper.results import Results
from rankup.paper.tables import Table, markdown, rich_tables
from rankup.report.theme import DARK, LIGHT
from rankup.store import write_file

PICTURES = "figures"  # the folder of pictures, in that of the results


def show_parts(parts: Mapping[str, Table | Figure], results: Results) -> None:
    console = Console()
    for name, part in parts.items():
        if isinstance(part, Figure):
            written = part.write(name, results, results.root / PICTURES)
            for each in written:
                path = results.root / PICTURES / f"{each}.png"
                console.print(f"{part.title}: {path}", soft_wrap=True)
            if not written:
                console.print(f"{part.title}: nothing was run that it shows")
            continue
        for table in rich_tables(part, results):
            console.print(table)
        if part.differs:
            console.print(part.differs, soft_wrap=True, highlight=False)


def write_page(parts: Mapping[str, Table | Figure], results: Results, page: Path) -> None:
    """A Markdown page with all tables, and pictures beside it."""
    text = ["# Results", "", "Written by `rankup paper`; mean ± standard deviation over seeds."]
    for name, part in parts.items():
        text += ["", f"## {part.title}", "", f"`rankup paper {name}`"]
        if part.differs:
            text += ["", part.differs]
        if isinstance(part, Figure):
            for each in part.write(name, results, page.parent / page.stem):
                light, dark = (f"{page.stem}/{each}{theme.suffix}.png" for theme in (LIGHT, DARK))
                text += [
                    "",
                    f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
                    f'<img alt="{part.title}" src="{light}"></picture>',
                ]
        else:
            text += ["", markdown(part, results)]
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        write_file(page, "\n".join([*text, ""]).encode())
    except OSError as error:
        raise RankupError(f"{page} cannot be written: {error.strerror}") from error
