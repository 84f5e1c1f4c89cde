"""Mixed batches answered by CUDA graphs: the same answers, after a commit and in copies, too. A
machine without a GPU records the call itself in place of a graph."""

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import rankup
from helpers.zoo import GPU, assert_same_bits, inputs, relative_error, taught
from rankup.net import graphs

IDS = torch.tensor([2, 0, 1, 1, 0])
OTHERS = torch.tensor([0, 1, 2, 0, 2])


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened: `record` for every capture, `replay` for every start of a graph."""
    happened: list[str] = []

    def record(
        call: Callable[[], Any], tasks: Tensor, memory: Any
    ) -> tuple[Callable[[], None], Any]:
        happened.append("record")
        answer = call()

        def replay() -> None:
            happened.append("replay")
            for own, new in zip(tree_leaves(answer), tree_leaves(call()), strict=True):
                own.copy_(new)

        return replay, answer

    monkeypatch.setattr(graphs, "record", record)
    monkeypatch.setattr(graphs, "can_capture", lambda tasks: True)
    monkeypatch.setattr(graphs, "new_memory", lambda device: ())
    return happened


@torch.enable_grad()
def learned(device: str = "cpu") -> tuple[rankup.IncrementalNet, Tensor]:
    net = taught("transformer", tasks=(3, 3, 3), base="keep").to(device)
    return net, inputs("transformer", batch=5).to(device)


def commit(net: rankup.IncrementalNet) -> None:
    net.begin_task("another", 3)
    for parameter in net.parameters():
        parameter.add_(0.1)
    net.commit_task()
    net.eval()


def test_graph_answers_from_second_batch_of_a_shape_on(recorded: list[str]) -> None:
    net, x = learned()
    expected = [net(x, task=ids) for ids in (IDS, OTHERS)]
    net.capture()
    for number, wanted in enumerate([*expected, *expected]):
        assert_same_bits(net(x, task=(IDS, OTHERS)[number % 2]), wanted)
    assert recorded == ["record", "replay", "replay", "replay"]
    assert relative_error(net(x + 1, task=IDS), expected[0]) > 1e-3
    net.capture(0)
    net(x, task=IDS)
    assert len(recorded) == 5


def test_answers_stay_when_their_graph_runs_again(recorded: list[str]) -> None:
    net, x = learned()
    net.capture()(x, task=IDS)
    first = net(x, task=IDS)
    before = first.clone()
    net(x, task=OTHERS)
    assert_same_bits(first, before)


def test_commit_captures_again(recorded: list[str]) -> None:
    net, x = learned()
    net.capture()
    for _ in range(2):
        net(x, task=IDS)
    commit(net)
    ids = torch.tensor([3, 0, 1, 3, 0])
    found = net(x, task=ids)
    assert recorded == ["record", "replay", "replay", "record", "replay"]  # the stale one, too
    assert_same_bits(found, net.capture(0)(x, task=ids))


def test_commit_drops_all_graphs_and_what_they_held(
    recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch refuses to capture into a pool whose graphs are all gone, so there is a new one."""
    pools: list[object] = []
    monkeypatch.setattr(graphs, "new_memory", lambda device: pools.append(object()) or pools[-1])
    net, x = learned()
    net.capture()
    for few in (5, 5, 4, 4):
        net(x[:few], task=IDS[:few])
    assert len(pools) == 1
    table = weakref.ref(next(layer for layer in net.layers if hasattr(layer, "S")).S)
    commit(net)
    net(x, task=IDS)
    assert table() is None
    assert len(pools) == 2
    assert recorded.count("record") == 3
    net(x[:4], task=IDS[:4])
    assert recorded.count("record") == 4
    assert len(pools) == 2


def test_weights_changed_in_place_are_captured_again(recorded: list[str]) -> None:
    net, x = learned()
    net.capture()
    for _ in range(2):
        net(x, task=IDS)
    next(layer for layer in net.layers if hasattr(layer, "U")).U.mul_(2)
    net(x, task=IDS)
    assert recorded.count("record") == 2


def test_unknown_task_is_refused(recorded: list[str]) -> None:
    net, x = learned()
    net.capture()
    for _ in range(2):
        net(x, task=IDS)
    with pytest.raises(rankup.RankupError):
        net(x, task=IDS + 1)


def test_least_recently_used_graph_goes(recorded: list[str]) -> None:
    net, x = learned()
    net.capture(1)
    for few in (5, 5, 4, 4, 5):
        net(x[:few], task=IDS[:few])
    assert recorded.count("record") == 3


def test_training_and_gradients_run_without(recorded: list[str]) -> None:
    net, x = learned()
    net.capture()
    for _ in range(3):
        net.train()(x, task=IDS)
        with torch.enable_grad():
            net.eval()(x, task=IDS)
    assert not recorded


def test_module_that_cannot_be_captured_runs_without(
    recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(*_: Any) -> Any:
        raise RuntimeError("it waits")

    net, x = learned()
    expected = net(x, task=IDS)
    monkeypatch.setattr(graphs, "record", record)
    net.capture()(x, task=IDS)
    with pytest.warns(UserWarning, match="without a CUDA graph: it waits"):
        assert_same_bits(net(x, task=IDS), expected)
    assert_same_bits(net(x, task=IDS), expected)


def test_copy_captures_its_own(recorded: list[str]) -> None:
    net, x = learned()
    net.capture()
    for _ in range(2):
        net(x, task=IDS)
    other = copy.deepcopy(net)
    commit(other)
    for _ in range(2):
        found = other(x, task=torch.full_like(IDS, 3))
    assert recorded.count("record") == 2
    assert_same_bits(found, other.capture(0)(x, task=torch.full_like(IDS, 3)))


def test_cpu_answers_as_without() -> None:
    net, x = learned()
    expected = net(x, task=IDS)
    net.capture()
    for _ in range(3):
        assert_same_bits(net(x, task=IDS), expected)


@pytest.mark.parametrize("given", [-1, True, "all"])
def test_number_of_graphs_is_checked(given: Any) -> None:
    with pytest.raises(rankup.RankupError, match="number of graphs"):
        learned()[0].capture(given)


@GPU
@pytest.mark.parametrize("autocast", [False, True])
def test_graph_on_gpu_answers_as_without(autocast: bool) -> None:
    net, x = learned("cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        expected = [net(x, task=ids.cuda()) for ids in (IDS, OTHERS)]
        net.capture()
        for number in range(6):
            found = net(x, task=(IDS, OTHERS)[number % 2].cuda())
            wanted = expected[number % 2]
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        assert net._mixed.graphs is not None
        assert len(net._mixed.graphs._graphs) == 1
        commit(net)
        ids = torch.full_like(IDS, 3).cuda()
        found = net(x, task=ids)
        torch.testing.assert_close(found, net.capture(0)(x, task=ids), rtol=2e-2, atol=2e-2)
