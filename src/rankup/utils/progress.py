"""A bar on the terminal for what takes long."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]

_DELAY = 1.0  # seconds before a bar appears


def can_show() -> bool:
    """Whether somebody may be watching: in a terminal or a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


@contextmanager
def progress_bar(title: str, total: int, show: bool) -> Iterator[Advance]:
    """Yield a function that counts what is done; a bar appears if it takes long."""
    began = time.monotonic()
    done = 0
    bar = None

    def advance(count: int) -> None:
        nonlocal bar, done
        done += count
        if bar is None and show and done < total and time.monotonic() - began > _DELAY:
            # Imported only if a bar is shown, as it takes long.
            from rich.console import Console
            from rich.progress import Progress

            bar = Progress(console=Console(stderr=True), transient=True, disable=not can_show())
            bar.add_task(title, total=total)
            bar.start()
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()
