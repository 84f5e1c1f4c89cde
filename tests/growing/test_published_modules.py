"""What many published modules do in their forward besides running layers."""

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rankup


class OfItsKind(nn.Module):
    """Moves its inputs to the dtype and device of its first layer, as many published modules do."""

    def __init__(self, traced: bool) -> None:
        super().__init__()
        self.conv, self.mid, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 6), nn.Linear(6, 3)
        self.traced = traced

    def forward(self, x: Tensor) -> Tensor:
        if not self.traced and x.sum() > 1e9:
            x = x * 0
        x = x.to(self.conv.weight.device, self.conv.weight.dtype)
        hidden = self.mid(self.conv(x).relu().mean((2, 3)))
        answer: Tensor = self.head(hidden.relu())
        return answer


@pytest.mark.parametrize("traced", [False, True])
def test_a_forward_may_look_at_the_kind_of_a_weight(traced: bool) -> None:
    net = rankup.grow(OfItsKind(traced), rankup.Rank(2, 1), head="head")
    x = torch.randn(5, 1, 6, 6)
    for name in ("a", "b"):
        net.begin_task(name, 3)
        net(x, task=name).sum().backward()
        assert all(p.grad is not None for p in net.parameters())
        net.commit_task()
    torch.testing.assert_close(net.merged("a")(x), net(x, task="a"))


@pytest.mark.parametrize("kind", ["conv", "mid"])
def test_the_weight_of_a_layer_is_that_of_the_task_that_is_run(kind: str) -> None:
    net = rankup.grow(OfItsKind(True), rankup.Rank(2, 1), head="head")
    for name in ("a", "b"):
        net.begin_task(name, 3)
        net.commit_task()
    layer = net.body.get_submodule(kind)
    for task in (0, 1):
        with rankup.layers.active(task):
            merged = net.merged(task).get_submodule(kind)
            assert torch.equal(layer.weight, merged.weight)  # type: ignore[arg-type]
    with pytest.raises(rankup.TaskStateError, match="has a weight for each task"):
        _ = layer.weight


class Checkpointed(nn.Module):
    """Recomputes its block in the backward pass, if told to."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.head, self.again = nn.Linear(8, 3), again

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.twice(x) if self.again else self.block(x))  # type: ignore[no-any-return]

    def twice(self, x: Tensor) -> Tensor:
        task = rankup.layers.active_task()
        hidden: Tensor = checkpoint(
            self.block,
            x,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), rankup.layers.active(task)),
        )
        return hidden


def test_a_block_is_run_again_for_its_task_in_whatever_thread() -> None:
    x, found = torch.randn(6, 8), list[list[Tensor | None]]()
    Checkpointed(again=True)(x).sum().backward()  # the module alone can do that, too
    for again in (False, True):
        net = rankup.grow(Checkpointed(again), rankup.Rank(2, 1), head="head")
        net.begin_task("a", 3)
        loss = net(x, task="a").square().sum()
        thread = threading.Thread(target=loss.backward)  # as autograd has for a GPU
        thread.start()
        thread.join()
        found.append([p.grad for p in net.parameters()])
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
