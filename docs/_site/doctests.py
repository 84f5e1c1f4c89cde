"""An extension of griffe: doctests in docstrings become blocks of code."""

from itertools import groupby
from typing import Any

import griffe


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring and ">>>" in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with a fence around each paragraph that begins with a prompt.

    >>> fenced("Adds.\\n\\n>>> 1 + 1\\n2")
    'Adds.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```'
    """
    blocks = []
    for blank, lines in groupby(text.splitlines(), key=lambda line: not line.strip()):
        block = list(lines)
        if not blank and block[0].lstrip().startswith(">>>"):
            block = ["```pycon", *block, "```"]
        blocks += block
    return "\n".join(blocks)
