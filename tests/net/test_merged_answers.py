"""Answers with a task's weight merged with the kept one: the same bits whatever is cached, evicted
or learned later, and those of the other forms to rounding."""

import gc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rankup
from helpers.zoo import assert_same_bits, inputs, module, relative_error
from rankup.layers import cached, dispatch
from rankup.layers.cached import CACHE
from rankup.rank import Rank

KINDS = ("mlp", "transformer", "convolutions")


@pytest.fixture(autouse=True)
def _merged_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "MERGES_ON", {"cpu", "cuda"})
    CACHE.clear()
    yield
    CACHE.clear()


def taught(kind: str, tasks: str = "abc") -> tuple[rankup.IncrementalNet, Tensor]:
    torch.manual_seed(0)
    net, x = rankup.grow(module(kind), Rank(2, 1, seeded=3), base="keep"), inputs(kind)
    for name in tasks:
        add(net, name, x)
    return net.eval(), x


def add(net: rankup.IncrementalNet, name: str, x: Tensor) -> None:
    net.begin_task(name, 3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    net.commit_task([x])


def counted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the cache does not have and is made."""
    made: list[object] = []
    keep = cached.Cache._keep

    def noted(self: cached.Cache, layer: nn.Module, key: object, *rest: object) -> None:
        made.append(key)
        keep(self, layer, key, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(cached.Cache, "_keep", noted)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_cache(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = taught(kind)
    made = counted(monkeypatch)
    first = net(x, task="b")
    assert made
    made.clear()
    assert_same_bits(net(x, task="b"), first)
    assert not made
    CACHE.clear()
    assert_same_bits(net(x, task="b"), first)
    monkeypatch.setattr(CACHE, "limit", 0)  # nothing stays
    CACHE.clear()
    made.clear()
    for _ in range(2):
        assert_same_bits(net(x, task="b"), first)
    assert len(made) == 2 * len({id(layer) for layer in net.layers if hasattr(layer, "may_merge")})


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_later_tasks(kind: str) -> None:
    net, x = taught(kind)
    before = {task: net(x, task=task) for task in "abc"}
    add(net, "d", x)
    for task, answer in before.items():
        assert_same_bits(net(x, task=task), answer)
    net.remove_task("d")
    for task, answer in before.items():
        assert_same_bits(net(x, task=task), answer)


@pytest.mark.parametrize("kind", KINDS)
def test_removed_task_leaves_no_other_ones_weight(kind: str) -> None:
    net, x = taught(kind, "ab")
    net.begin_task("c", 3, uses="own")
    net.commit_task([x])
    for task in "abc":
        net(x, task=task)
    expected = net(x, task="c")
    net.remove_task("b")  # now "c" has its index
    assert_same_bits(net(x, task="c"), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_forms_agree(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = taught(kind)
    merged = net(x, task="b")
    assert relative_error(net.merged("b")(x), merged) < 1e-5
    monkeypatch.setattr(dispatch, "MERGES_ON", set())
    assert relative_error(net(x, task="b"), merged) < 1e-5


def test_weights_changed_in_place_are_merged_again() -> None:
    net, x = taught("mlp")
    before = net(x, task="b")
    layer = next(layer for layer in net.layers if hasattr(layer, "base_weight"))
    layer.base_weight.mul_(2)
    assert relative_error(net(x, task="b"), before) > 1e-3


def test_least_recently_used_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = taught("mlp")
    net(x, task="a")
    one = sum(entry.bytes for entry in CACHE._entries.values())
    monkeypatch.setattr(CACHE, "limit", 2 * one)
    for task in "bac":
        net(x, task=task)
    assert {key[1][1] for key in CACHE._entries} == {0, 2}  # type: ignore[index]
    assert sum(entry.bytes for entry in CACHE._entries.values()) <= 2 * one


def test_cache_goes_with_its_network() -> None:
    net, x = taught("mlp")
    net(x, task="a")
    assert CACHE._entries
    del net
    gc.collect()
    assert not CACHE._entries


def test_answers_of_inference_mode_can_be_followed_by_gradients() -> None:
    net, x = taught("transformer")
    with torch.inference_mode():
        expected = net(x, task="a").clone()
    x = x.clone().requires_grad_()
    answer = net(x, task="a")
    answer.sum().backward()
    assert x.grad is not None
    assert_same_bits(answer.detach(), expected)


def test_threads_share_what_is_cached() -> None:
    net, x = taught("transformer")
    expected = {task: net(x, task=task) for task in "abc"}
    CACHE.clear()
    with ThreadPoolExecutor(4) as pool:
        for task, answer in pool.map(lambda t: (t, net(x, task=t)), "abcabcabcabc"):
            assert_same_bits(answer, expected[task])


def test_large_networks_do_not_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MOST_MERGED", 10)
    net, x = taught("mlp")
    net(x, task="a")
    assert not CACHE._entries


def test_rows_of_all_layers_are_gathered_at_once() -> None:
    def gathers(depth: int) -> int:
        layers = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(depth)]
        net = rankup.grow(nn.Sequential(*layers, nn.Linear(4, 3)), Rank(2, 1), base="keep")
        x = torch.randn(5, 4)
        for name in "abc":
            add(net, name, x)
        ids = torch.tensor([0, 2, 1, 1, 0])
        net(x, task=ids)
        with torch.no_grad(), Counted() as counted:
            net(x, task=ids)
        return counted.by_name["aten.index_select.default"]

    assert gathers(1) == gathers(4) > 0


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.by_name[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (6, 5, 4), (6, 2, 3, 4)])
@pytest.mark.parametrize("autocast", [True, False])
def test_mixed_batch_beside_kept_weight(bias: bool, shape: tuple[int, ...], autocast: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 8, bias)
    net = rankup.grow(nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 3)), Rank(2, 1), base="keep")
    x, ids = torch.randn(shape), torch.tensor([2, 0, 1, 1, 0, 2])
    for name in "abc":
        add(net, name, x)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        alone = torch.cat([net(x[i : i + 1], task=int(task)) for i, task in enumerate(ids)])
        mixed = net(x, task=ids)
    assert mixed.dtype == alone.dtype
    assert relative_error(mixed.float(), alone.float()) < (0.02 if autocast else 1e-5)
    if not autocast:
        x.requires_grad_()
        net(x, task=ids).square().sum().backward()
        found, x.grad = x.grad, None
        for i, task in enumerate(ids):
            net(x[i : i + 1], task=int(task)).square().sum().backward()
        assert found is not None
        assert x.grad is not None
        assert relative_error(found, x.grad) < 1e-5
