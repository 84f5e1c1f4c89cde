"""What `rankup push` and `rankup pull` have in common: options, what they say of files and tasks,
and the Hub's own bars."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

Yes = Annotated[
    bool, typer.Option("--yes", "-y", help="Do not ask before tasks are removed where it goes.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be transferred, and change nothing.")
]


@contextmanager
def hub_bars() -> Iterator[None]:
    """Show the bars of the Hub's client in a terminal only: a log would get a line for each."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def sizes(files: Mapping[str, int]) -> str:
    """How many files, of how many bytes.

    >>> sizes({"a": 1500, "b": 1}), sizes({})
    ('2 files of 1,501 bytes', 'no file')
    """
    if not files:
        return "no file"
    count = f"{len(files)} file{'s' if len(files) != 1 else ''}"
    return f"{count} of {sum(files.values()):,} bytes"


def tasks_named(names: Sequence[str]) -> str:
    """Tasks by name.

    >>> tasks_named(["a"]), tasks_named(["a", "b"])
    ("task 'a'", "tasks 'a', 'b'")
    """
    from rankup.net.tasks import listed

    return f"task{'s' if len(names) != 1 else ''} {listed(names)}"


def would(change: str, removed: Sequence[str]) -> str:
    """What a dry run says.

    >>> would("upload 1 file", ["a"])
    "Would upload 1 file and remove task 'a' there; nothing was changed"
    """
    gone = f" and remove {tasks_named(removed)} there" if removed else ""
    return f"Would {change}{gone}; nothing was changed"


def confirm_removal(there: str, removed: Sequence[str], other: str, yes: bool) -> None:
    """Ask before tasks are removed; without a yes, nothing is done."""
    if removed and not yes:
        question = f"{there} has {tasks_named(removed)} otherwise than {other}; remove there?"
        typer.confirm(question, abort=True, err=True)
