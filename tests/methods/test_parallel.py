"""Every task has its own network, the same as it would be without any other task."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rankup.data.streams import Stream, make_stream
from rankup.data.tasks import Task
from rankup.layers import FactoredLayer
from rankup.methods.parallel import Parallel
from rankup.methods.rank import RankUpdate
from rankup.testing import NETS, make_method
from rankup.training.engine.select import _signature

SIZES = ["2", "full"]


def make(size: str, tasks: Sequence[Task], net: str = "mlp") -> Any:
    stream = Stream("any", tuple(tasks))
    return make_method("parallel", stream, NETS[net](), options={"size": size}, epochs=2)


def answers(method: Parallel, task: Task, index: int) -> Tensor:
    with torch.no_grad():
        return method.predict(task.test_x[:50] / 255, index)


def blobs(size: int, classes: int = 10, samples: int = 200) -> Task:
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(samples) % classes
    centres = torch.rand(classes, size, generator=draw)
    x = (centres[y] + 0.1 * torch.randn(samples, size, generator=draw)).clamp(0, 1)
    return Task("blobs", classes, x, y, x, y)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("size", SIZES)
def test_a_task_does_not_depend_on_those_before_it(size: str, net: str) -> None:
    tasks = make_stream("s-digits").tasks
    found = []
    for before in (tasks[:1], tasks[3:4]):
        method = make(size, tasks, net)
        for task in (*before, tasks[2]):
            method.learn(task, None, None)
        found.append(answers(method, tasks[2], 1))
    assert torch.equal(*found)
    # This is only meaningful if the same data under another index gives something else.
    method.learn(tasks[2], None, None)
    assert not torch.equal(answers(method, tasks[2], 2), found[0])
    assert torch.equal(answers(method, tasks[2], 1), found[0])


@pytest.mark.parametrize("size", SIZES)
def test_each_network_has_a_seed_of_its_own(size: str) -> None:
    method = make(size, [blobs(64)] * 3)
    own = [method._own_setting(index) for index in range(3)]
    assert len({setting.seed for setting in own}) == 3
    assert all(setting.grow_options.seed == setting.seed for setting in own)


def test_low_rank_networks_share_nothing() -> None:
    stream = make_stream("p-digits", tasks=3)
    method = make("2", stream.tasks)
    for task in stream:
        method.learn(task, None, None)
    seen: set[int] = set()
    for network in method.networks:
        assert isinstance(network, RankUpdate)
        layers = [part for part in network.net.parts if isinstance(part, FactoredLayer)]
        assert [int(torch.linalg.matrix_rank(layer.matrix(0))) for layer in layers] == [2, 2]
        own = {tensor.untyped_storage().data_ptr() for tensor in network.net.buffers()}
        assert not own & seen
        seen |= own


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("size", SIZES)
def test_all_tasks_share_a_captured_graph(size: str, net: str) -> None:
    stream = make_stream("p-digits", tasks=3)
    method, stranger = make(size, stream.tasks, net), make(size, stream.tasks, net)
    signatures = []
    for task in stream:
        signatures.append(_signature(method.begin(task)))
        method.end()
    assert signatures[0] == signatures[1] == signatures[2]
    assert _signature(stranger.begin(stream[0])) != signatures[0]


@pytest.mark.parametrize("size", SIZES)
def test_saves_are_incremental_and_crash_safe(size: str, tmp_path: Path) -> None:
    stream = make_stream("p-digits", tasks=3)
    method = make(size, stream.tasks)
    assert not Parallel.is_in(tmp_path)
    for task in stream.tasks[:2]:
        method.learn(task, None, None)
    method.save(tmp_path / "a")
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*.*")}
    method.learn(stream[2], None, None)
    method.save(tmp_path / "a")
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*.*")}
    assert written.items() <= after.items()
    assert len(after) > len(written)
    # Killed in the third task's save: there is a folder, but nothing complete in it.
    for path in (tmp_path / "a" / "0003").rglob("*.*"):
        path.unlink()
    assert Parallel.is_in(tmp_path / "a")
    loaded = Parallel.load(tmp_path / "a", method.setting)
    assert loaded.learned == 2
    for task in range(2):
        assert torch.equal(answers(loaded, stream[task], task), answers(method, stream[task], task))
    # Elsewhere, and where something is missing, all of it is written.
    for folder in ("a", "b"):
        method.save(tmp_path / folder)
        assert Parallel.load(tmp_path / folder, method.setting).learned == 3
