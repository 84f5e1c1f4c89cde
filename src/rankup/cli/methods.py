"""The command `rankup methods`."""

from typing import Annotated

import typer

from rankup.methods import all_methods

Plain = Annotated[bool, typer.Option("--plain", help="One name per line, for scripts.")]


def methods(plain: Plain = False) -> None:
    """List the methods."""
    list_names({name: entry.help for name, entry in all_methods().items()}, plain)


def list_names(entries: dict[str, str], plain: bool) -> None:
    if plain:
        print("\n".join(entries))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False)
    for name, help in entries.items():
        table.add_row(name, help)
    Console().print(table)
