"""A served network that takes small grey images, in the test's own process."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import rankup
from helpers.serving import GREY, network
from rankup.inference import learning, served
from rankup.inference.about import describe
from rankup.inference.app import Options, create_app

Serve = Callable[..., TestClient]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three tasks, the first two of images and the third of numbers."""
    rankup.save(network(3, 2, 5), tmp_path / "net")
    return tmp_path / "net"


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    def described(net: Any, name: str) -> Any:
        known = describe(net, name)
        if name not in ("task 1", "task 2"):
            return known
        names = ("ant", "bee", "cow")[: known.classes]
        return replace(known, inputs=GREY, class_names=names, accuracy=0.75, title=name.title())

    monkeypatch.setattr(served, "describe", described)
    monkeypatch.setattr(learning, "inputs_of", lambda net: GREY)


@pytest.fixture
def serve(folder: Path, images: None) -> Iterator[Serve]:
    with ExitStack() as stack:

        def serve(**options: Any) -> TestClient:
            app = create_app(folder, Options(**{"hosts": None, **options}))
            return stack.enter_context(TestClient(app, raise_server_exceptions=False))

        yield serve
