"""Sentences on the terminal, broken between words."""

import json
import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import TextIO


def say(text: str, file: TextIO | None = None) -> None:
    """Print sentences: verbatim, but in a terminal broken between words, so that names stay
    whole."""
    file = file or sys.stdout
    if file.isatty():
        width = shutil.get_terminal_size().columns
        text = "\n".join(filled(line, width) for line in text.splitlines())
    print(text, file=file, flush=True)


def tell(told: Mapping[str, object], text: str, as_json: bool) -> None:
    """Print what a command has to tell: for scripts as JSON, or for people in sentences."""
    if as_json:
        print(json.dumps(told))
    else:
        say(text)


def filled(line: str, width: int) -> str:
    """A line in lines of at most that many characters, unless a word is longer.

    >>> filled("a new network in nets/shop-of-ours", 24)
    'a new network in\\nnets/shop-of-ours'
    """
    return textwrap.fill(
        line,
        width,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    )
