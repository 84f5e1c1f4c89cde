"""Finished runs that are made once, to be copied and damaged."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.runs import config_for
from rankup.data.streams import Stream, make_stream
from rankup.runs.run import run


@pytest.fixture(scope="session")
def stream() -> Stream:
    return make_stream("p-digits", tasks=3)


@pytest.fixture(scope="session")
def learned(stream: Stream, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished runs, by method."""
    root = tmp_path_factory.mktemp("learned")
    for method in ("rank", "finetune", "parallel"):
        run(config_for(stream, method), stream, root / method)
    return root


@pytest.fixture
def copied(learned: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a finished run, to be damaged."""
    return lambda method: Path(shutil.copytree(learned / method, tmp_path / method))
