"""An extension of griffe for our docstrings: doctests as code, and help texts of options."""

from ast import literal_eval
from itertools import groupby
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring and ">>>" in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Document fields such as `epochs: int = option(10, "Passes.")` as parameters."""
        options = {
            name: attribute.value.arguments
            for name, attribute in cls.attributes.items()
            if isinstance(attribute.value, griffe.ExprCall)
            and str(attribute.value.function).lstrip("_") == "option"
        }
        if not options or not cls.docstring:
            return
        for parameter in cls.parameters:
            if parameter.name in options:
                parameter.default = options[parameter.name][0]
        lines = [f"    {name}: {literal_eval(str(args[1]))}" for name, args in options.items()]
        cls.docstring.value = "\n".join([cls.docstring.value, "", "Args:", *lines])


def fenced(text: str) -> str:
    """Put a fence around each paragraph that begins with a prompt.

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
