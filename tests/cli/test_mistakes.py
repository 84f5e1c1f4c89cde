"""Likely mistakes in the first calls of the library get one clear sentence."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import rankup
from rankup.data import Task, make_stream
from rankup.runs.request import Request

NET = rankup.grow(rankup.models.mlp(64, hidden=[16]), rankup.Rank(2, 1))
TASK = make_stream("p-digits", tasks=1)[0]
X, Y = torch.rand(4, 64), torch.tensor([0, 1, 2, 0])

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "bytes": (lambda: NET(TASK.test_x, task=0), "torch.uint8, but the network computes in"),
    "an array": (lambda: Task("m", 3, np.zeros((4, 64)), Y, X, Y), "must be a tensor, got ndarray"),
    "a list": (lambda: Task("m", 3, X, [0, 1, 2, 0], X, Y), "labels must be a tensor, got list"),
    "a pair": (lambda: rankup.fit(NET, (X, Y)), "fit takes a rankup.data.Task, got tuple"),
    "a pair to test": (lambda: rankup.accuracy(NET, (X, Y)), "accuracy takes a rankup.data.Task, "),
    "a name": (lambda: rankup.fit(NET, TASK, "default"), "fit takes a rankup.Recipe, got str"),
    "a number": (lambda: rankup.models.mlp(64, hidden=256), "hidden=256"),
    "less than nothing": (lambda: rankup.models.mlp(64, hidden=[-3]), r"hidden=\[-3\]"),
    "no inputs": (lambda: rankup.models.mlp(0), "got 0 inputs"),
    "no width": (lambda: rankup.models.resnet18(0), "at least 1 as width, got 0"),
    "half a width": (lambda: rankup.models.resnet18(2.5), "at least 1 as width, got 2.5"),
    "a plain module": (lambda: rankup.fit(NET.body, TASK), "a network made by rankup.grow"),
    "a module to test": (lambda: rankup.accuracy(NET.body, TASK), "made by rankup.grow, got MLP"),
    "a word as a seed": (lambda: rankup.fit(NET, TASK, seed="x"), "a whole number, got 'x'"),
    "a path to resume": (lambda: rankup.fit(NET, TASK, resume="x"), "from a Checkpoint, got str"),
    "no pixels": (lambda: rankup.data.load_source(".", side=0), "side must be .* got 0"),
    "several to merge": (lambda: NET.merged([0, 1]), r"a name or an index, got \[0, 1\]"),
    "a stream's number": (lambda: make_stream(3), "a stream is given by its name, got int"),
}


@pytest.mark.parametrize("given", REFUSED)
def test_likely_mistake_is_named(given: str) -> None:
    call, words = REFUSED[given]
    with pytest.raises(rankup.RankupError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert NET.learning is None


def test_long_path_has_a_short_and_unique_folder_name() -> None:
    places = ["a" * 90, "b" * 90, "a" * 40 + "/" + "a" * 49]
    streams = [f"split:{place}/{'é' * 90}@64" for place in places]
    names = [Request(stream=stream).folder("compare").name for stream in streams]
    assert len(set(names)) == 3
    assert all(name.startswith("compare-split-éééé") for name in names)
    assert all(len(name.encode()) < 200 for name in names)  # file systems allow 255
