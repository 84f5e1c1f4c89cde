"""A served network that takes small grey images, in the test's own process."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import rankup
from helpers.serving import GREY, network
from rankup.inference.app import Options, create_app

Serve = Callable[..., TestClient]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks, the first two of images and the third of numbers, only to be read."""
    folder = tmp_path_factory.mktemp("inference") / "net"
    net = network(3, 2, 5)
    for name, classes in (("task 1", ("ant", "bee", "cow")), ("task 2", ("ant", "bee"))):
        about = {"class_names": classes, "accuracy": 0.75, "title": name.title()}
        net.annotate(name, inputs=GREY, **about)
    rankup.save(net, folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made, tmp_path / "net"))


@pytest.fixture(scope="module")
def client(made: Path) -> Iterator[TestClient]:
    """Of one server for all tests of a file: as it starts it looks through all that is loaded."""
    app = create_app(made, Options(hosts=None))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def serve(folder: Path) -> Iterator[Serve]:
    with ExitStack() as stack:

        def serve(**options: Any) -> TestClient:
            app = create_app(folder, Options(**{"hosts": None, **options}))
            return stack.enter_context(TestClient(app, raise_server_exceptions=False))

        yield serve
