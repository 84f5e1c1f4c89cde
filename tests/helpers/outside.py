"""Methods from outside the package."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rankup.methods import METHODS, registry

NEW_METHOD = Path(__file__).parents[2] / "examples" / "new_method.py"


@contextmanager
def only_built_in(monkeypatch: pytest.MonkeyPatch, *plugins: object) -> Iterator[None]:
    """Inside, no method is registered but the built-in ones, and RANKUP_METHODS names plugins."""
    before = dict(METHODS)
    monkeypatch.setenv(registry.VARIABLE, ",".join(map(str, plugins)))
    monkeypatch.setattr(registry, "_imported", set())
    try:
        yield
    finally:
        METHODS.clear()
        METHODS.update(before)
