"""Activation checkpointing: what is computed again in the backward pass is for the same task."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rankup
from rankup.layers import active
from rankup.rank import Rank


class Blocks(nn.Module):
    """Recomputes its blocks in the backward pass, if told how."""

    def __init__(self, how: str = "not") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.2), nn.ReLU())
            for _ in range(2)
        )
        self.head, self.how = nn.Linear(8, 3), how

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.how == "not":
                x = block(x)
            elif self.how == "nested":
                x = checkpoint(checkpoint, block, x, use_reentrant=False)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        logits: Tensor = self.head(x)
        return logits


def network(how: str) -> rankup.IncrementalNet:
    torch.manual_seed(0)
    net = rankup.grow(Blocks(how), Rank(2, 1), head="head")
    for task in "ab":
        net.begin_task(task, 3)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        if task == "a":
            net.commit_task()
    return net.train()


def in_this_thread(backward: Callable[[], None]) -> None:
    backward()


def in_another(backward: Callable[[], None]) -> None:
    thread = threading.Thread(target=backward)  # as autograd has one for a GPU
    thread.start()
    thread.join()


def during_another_task(backward: Callable[[], None]) -> None:
    with active(0):
        backward()


def gradients(
    net: rankup.IncrementalNet, run: Callable[[Callable[[], None]], None], how: str
) -> list[Tensor]:
    net.body.how = how
    torch.manual_seed(1)
    x = torch.randn(6, 8, requires_grad=True)
    loss = net(x, task="b").square().sum()
    net.zero_grad()
    run(loss.backward)
    return [p.grad for p in (x, *net.parameters()) if p.grad is not None]


@pytest.mark.parametrize("run", [in_this_thread, in_another, during_another_task])
def test_gradients_are_those_without_checkpoints(
    run: Callable[[Callable[[], None]], None],
) -> None:
    net = network("blocks")
    found = gradients(net, run, "blocks")
    expected = gradients(net, in_this_thread, "not")
    assert len(found) == len(expected) > 10
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_tasks_of_threads_are_recomputed_apart() -> None:
    net = network("blocks").eval()
    net.commit_task()
    x = torch.randn(4, 8)

    def answer(task: int) -> Tensor:
        own = x.clone().requires_grad_()
        return torch.autograd.grad(net(own, task=task).square().sum(), own)[0]

    expected = [answer(0), answer(1)]
    assert not torch.equal(*expected)
    with ThreadPoolExecutor(2) as pool:
        for task, found in enumerate(pool.map(answer, [0, 1] * 20)):
            assert torch.equal(found, expected[task % 2])


def test_mixed_batch_is_recomputed_for_its_tasks() -> None:
    net = network("blocks").eval()
    net.commit_task()
    x, found = torch.randn(4, 8), []
    for how in ("not", "blocks"):
        net.body.how = how
        own = x.clone().requires_grad_()
        loss = net(own, task=["a", "b", "b", "a"]).square().sum()
        found.append(torch.autograd.grad(loss, own)[0])
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["reentrant", "nested"])
def test_other_checkpoints_are_refused_not_wrong(how: str) -> None:
    net = network(how)
    loss = net(torch.randn(6, 8, requires_grad=True), task="b").square().sum()
    with pytest.raises(rankup.TaskStateError, match="use_reentrant=False"):
        loss.backward()
