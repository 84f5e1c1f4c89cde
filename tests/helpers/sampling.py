"""Cross products of which `make test` runs a sample, and `make test-all` the rest."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def sampled(*choices: Sequence[Any]) -> list[Any]:
    """All combinations. Those outside of a diagonal, on which every choice occurs, are slow."""
    longest = max(map(len, choices))
    diagonal = {tuple(i % len(values) for values in choices) for i in range(longest)}
    numbered = product(*(enumerate(values) for values in choices))
    return [
        pytest.param(
            *(value for _, value in combination),
            marks=() if tuple(i for i, _ in combination) in diagonal else pytest.mark.slow,
        )
        for combination in numbered
    ]
