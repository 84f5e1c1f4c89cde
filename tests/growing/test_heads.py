"""Heads of every kind: several, convolutional, with a forward of their own, new ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankup
from helpers.zoo import relative_error
from rankup.layers import TaskHead
from rankup.rank import Rank

CLASSES = {"a": 2, "b": 4}


class Distilled(nn.Module):
    """Gives both heads' answers in training, and their mean in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head, self.head_dist = nn.Linear(8, 3), nn.Linear(8, 3)

    def get_classifier(self) -> tuple[nn.Module, nn.Module]:
        return self.head, self.head_dist

    def forward(self, x: Tensor) -> Any:
        x = self.body(x).relu()
        one, other = self.head(x), self.head_dist(x)
        return (one, other) if self.training else (one + other) / 2


class Pooled(nn.Module):
    """A 1×1 convolution answers at every position; their mean is the answer."""

    def __init__(self, pooled_last: bool = True) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 3, 1)
        self.pooled_last = pooled_last

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).relu()
        if self.pooled_last:
            return self.head(x).mean((2, 3))
        return self.head(x.mean((2, 3), keepdim=True)).flatten(1)


class Cosine(nn.Linear):
    """Compares directions, with a temperature."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.temperature = nn.Parameter(torch.tensor(5.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.temperature * F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1))


class Composite(nn.Module):
    """A norm and a hidden layer belong to the head, as in LeViT and RoBERTa."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def get_classifier(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


class Features(nn.Module):
    """Built without a head, and knows how to make one."""

    num_features = 8

    def __init__(self, knows: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Identity()
        if knows:
            self.reset_classifier = self._reset_classifier

    def _reset_classifier(self, classes: int) -> None:
        self.head: nn.Module = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


def with_cosine() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Cosine(8, 3))


ROWS, IMAGES = (8, 6), (8, 1, 5, 5)
KINDS: dict[str, tuple[Any, dict[str, Any], tuple[int, ...], list[str]]] = {
    "two, by the model's word": (Distilled, {}, ROWS, ["head", "head_dist"]),
    "two, given": (Distilled, {"head": ["head", "head_dist"]}, ROWS, ["head", "head_dist"]),
    "a convolution": (Pooled, {}, IMAGES, ["head"]),
    "a convolution on pooled features": (lambda: Pooled(False), {}, IMAGES, ["head"]),
    "a forward of its own": (with_cosine, {}, ROWS, ["2"]),
    "a composite": (Composite, {}, ROWS, ["head.3"]),
    "a composite, given": (Composite, {"head": "head"}, ROWS, ["head.3"]),
    "a new one": (lambda: Features(False), {"head": "new"}, ROWS, ["head"]),
}


def answers(answer: Any) -> Tensor:
    return torch.stack(answer).mean(0) if isinstance(answer, tuple) else answer


@pytest.mark.parametrize("base", ["keep", "new"])
@pytest.mark.parametrize("kind", KINDS)
def test_head_keeps_every_promise(kind: str, base: Any, tmp_path: Path) -> None:
    make, options, shape, heads = KINDS[kind]
    module, x = make(), torch.randn(shape)
    net = rankup.grow(module, Rank(2, 1), base=base, **options)
    assert [layer.spec.name for layer in net.layers if isinstance(layer, TaskHead)] == heads
    for task, classes in CLASSES.items():
        net.train()
        net.begin_task(task, classes)
        optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
        for _ in range(3):
            optimiser.zero_grad()
            F.cross_entropy(answers(net(x, task=task)), torch.arange(8) % classes).backward()
            optimiser.step()
        assert all(p.grad is not None and p.grad.any() for p in net.parameters())
        net.commit_task()
        net.eval()
        if task == "a":
            before = net(x, task="a")
    assert torch.equal(net(x, task="a"), before)
    tasks = torch.arange(8) % 2
    mixed = net(x, task=tasks)
    for index, (task, classes) in enumerate(CLASSES.items()):
        alone = net(x, task=task)
        assert alone.shape == (8, classes)
        assert relative_error(mixed[tasks == index][:, :classes], alone[tasks == index]) < 1e-5
        assert relative_error(net.merged(task)(x), alone) < 1e-5
    assert bool((mixed[tasks == 0][:, 2:] == -torch.inf).all())
    rankup.save(net, tmp_path / "net")
    loaded = rankup.load(tmp_path / "net", module=make()).eval()
    assert torch.equal(loaded(x, task="b"), net(x, task="b"))


def test_distilled_model_combines_heads_as_it_does_itself() -> None:
    net, x = rankup.grow(Distilled(), Rank(2, 1)), torch.randn(4, 6)
    net.begin_task("a", 5)
    net.train()
    one, other = net(x, task="a")
    assert one.shape == other.shape == (4, 5)
    net.eval()
    torch.testing.assert_close(net(x, task="a"), (one + other) / 2)


def test_new_head_is_of_the_kind_that_the_model_makes() -> None:
    module = Features(True)
    net = rankup.grow(module, Rank(2, 1), head="new", base="keep")
    net.begin_task("a", 5)
    net.commit_task()
    assert isinstance(module.head, nn.Identity)  # of the given module, nothing changes
    merged = net.merged("a")
    assert isinstance(merged, Features)
    assert merged.state_dict()["head.weight"].shape == (5, 8)


def test_merged_head_of_its_own_kind_is_that_kind() -> None:
    net = rankup.grow(with_cosine(), Rank(2, 1), base="keep")
    net.begin_task("a", 5)
    net.commit_task()
    head: Any = net.merged("a").get_submodule("2")
    assert type(head) is Cosine
    assert (head.out_features, head.weight.shape) == (5, (5, 8))
    assert isinstance(head.weight, nn.Parameter)


class TwoAnswers(nn.Module):
    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.one, self.other = (nn.Linear(8, width) for width in widths)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x).relu()
        return self.one(x), self.other(x)


def test_two_heads_of_equal_standing_are_both_named_in_the_error() -> None:
    with pytest.raises(rankup.RankupError, match="'one' and 'other': name one, or all"):
        rankup.grow(TwoAnswers((3, 3)), Rank(2, 1))
    net = rankup.grow(TwoAnswers((3, 3)), Rank(2, 1), head=["one", "other"])
    net.begin_task("a", 4)
    assert [y.shape for y in net(torch.randn(2, 6), task="a")] == [(2, 4), (2, 4)]


def test_heads_of_a_segmentation_answer_at_every_position() -> None:
    module = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))
    net, x = rankup.grow(module, Rank(2, 1)), torch.randn(4, 1, 5, 6)
    for task, classes in CLASSES.items():
        net.begin_task(task, classes)
        assert net(x, task=task).shape == (4, classes, 5, 6)
        net.commit_task()
    mixed = net(x, task=["a", "b", "b", "a"])
    assert relative_error(mixed[1:3], net(x[1:3], task="b")) < 1e-5
    assert bool((mixed[0, 2:] == -torch.inf).all())
