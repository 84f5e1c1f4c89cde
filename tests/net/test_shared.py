"""Modules with tied weights, functions of their own, frozen parts, or a forward that looks at its
layers."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankup
from helpers.zoo import GPU
from rankup.rank import Rank


class Tied(nn.Module):
    """An embedding that shares its weight with a decoder, and a buffer that both halves read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(12, 16), nn.Linear(16, 16)
        self.decode = nn.Linear(16, 12, bias=False)
        self.decode.weight = self.embed.weight
        self.hidden, self.head = nn.Linear(12, 8), nn.Linear(8, 3)
        self.embed.register_buffer("scale", torch.full((1,), 0.5))
        self.decode.register_buffer("scale", self.embed.scale)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.embed(x).mean(1) * self.embed.scale).relu()
        return self.head(self.hidden(self.decode(x) * self.decode.scale).relu())


def is_tied(body: Any) -> bool:
    scales = body.embed.scale, body.decode.scale
    return body.embed.weight is body.decode.weight and scales[0] is scales[1]


def tied(base: str = "new") -> rankup.IncrementalNet:
    exclude = ["embed", "decode"]
    return rankup.grow(Tied(), Rank(2, 1), exclude=exclude, base=base)  # type: ignore[arg-type]


@pytest.mark.parametrize("base", ["new", "keep"])
def test_tied_tensors_stay_tied(base: str, tmp_path: Path) -> None:
    net, x = tied(base), torch.randint(12, (6, 5))
    for name in "ab":
        net.begin_task(name, 3)
        assert is_tied(net.body)
        net.commit_task()
        assert is_tied(net.body)
    merged = net.merged("a")
    assert is_tied(merged)
    assert "embed.weight" in dict(merged.named_parameters())
    torch.testing.assert_close(merged(x), net(x, task="a"))
    rankup.save(net, tmp_path / "net")
    loaded = rankup.load(tmp_path / "net", Tied())
    assert is_tied(loaded.body)
    assert torch.equal(loaded(x, task="b"), net.eval()(x, task="b"))


def test_module_with_two_names_is_one() -> None:
    class Twice(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.embed

    net = rankup.grow(Twice(), Rank(2, 1), exclude=["embed", "decode"])
    net.begin_task("a", 3)
    net.commit_task()
    merged = net.merged("a")
    assert is_tied(merged)
    assert merged.again is merged.embed


def test_moving_keeps_ties() -> None:
    net = tied()
    net.begin_task("a", 3)
    net.commit_task()
    assert is_tied(net.to("meta").body)


@GPU
def test_commit_after_move_to_another_device() -> None:
    net = tied()
    for name, device in (("a", "cuda"), ("b", "cpu")):
        net.begin_task(name, 3)
        net.to(device).commit_task()
        assert is_tied(net.body)
    assert net.body.embed.scale.tolist() == [0.5]


class Calling(nn.Module):
    """Runs its first layer through a given function."""

    def __init__(self, make: Callable[["Calling"], object]) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.calls = make(self)

    def run_hidden(self, x: Tensor, times: float = 1.0) -> Tensor:
        return times * self.hidden(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        calls: Any = self.calls
        return self.head((calls[0] if isinstance(calls, list) else calls)(x))


@pytest.mark.parametrize(
    "module",
    [
        Calling(lambda self: self.run_hidden),
        Calling(lambda self: partial(self.run_hidden, times=2.0)),
        Calling(lambda _: lambda x: F.pad(x, (0, 8))),
    ],
    ids=["method", "partial of a method", "lambda of nothing"],
)
def test_bound_methods_run_networks_layers(module: Calling) -> None:
    net = rankup.grow(module, Rank(2, 1), head="head")
    net.begin_task("a", 3)
    net(torch.rand(4, 8), task="a").sum().backward()
    assert module.hidden.weight.grad is None
    assert net.body.head.new_weight.grad is not None


class Looking(nn.Module):
    """Looks at what its layers have, and answers with the number of classes that it found."""

    def __init__(self, bias: bool = False, affine: bool = True) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, bias=bias), nn.BatchNorm2d(4, affine=affine)
        self.hidden, self.last = nn.Linear(4, 6, bias=bias), nn.LayerNorm(6, bias=bias)
        self.head = nn.Linear(6, 3, bias=bias)
        self.seen: list[Tensor | None] = []

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() < 0:  # so that it cannot be traced, which would see that weights are read
            return x
        assert self.norm.affine == (self.norm.weight is not None) == (self.norm.bias is not None)
        assert self.last.elementwise_affine
        assert (self.conv.transposed, self.conv.output_padding) == (False, (0, 0))
        self.seen = [part.bias for part in (self.conv, self.hidden, self.last, self.head)]
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        y = self.head(self.last(self.hidden(x)))
        return y.view(-1, self.head.out_features)


@pytest.mark.parametrize("affine", [False, True])
def test_forward_may_look_for_missing_biases(affine: bool) -> None:
    net = rankup.grow(Looking(affine=affine), Rank(2, 1), head="head")
    x = torch.rand(4, 1, 8, 8)
    for name, classes in (("a", 2), ("b", 5)):
        net.begin_task(name, classes)
        assert net(x, task=name).shape == (4, classes)
        net.commit_task(calibrate=[x])
        assert net(x, task=name).shape == (4, classes)
        assert net.body.seen == [None] * 4
    if not affine:  # a weight is each task's own
        assert net(x, task=[0, 1, 1, 0]).shape == (4, 5)


def test_forward_sees_bias_of_its_task() -> None:
    net = rankup.grow(Looking(bias=True), Rank(2, 1), head="head")
    x = torch.rand(4, 1, 8, 8)
    net.begin_task("a", 2)
    net(x, task="a")
    body = net.body
    layers = body.conv, body.hidden, body.last, body.head
    assert all(seen is part.new_bias for seen, part in zip(body.seen, layers, strict=True))
    net.commit_task(calibrate=[x])
    net.begin_task("b", 3)
    for task in (0, 1):
        net(x, task=task)
        plain = [part.merged(0).bias if task == 0 else part.new_bias for part in layers]
        assert all(torch.equal(*pair) for pair in zip(body.seen, plain, strict=True))
    net.commit_task(calibrate=[x])
    alone = "has a (weight|bias|number of classes) for each task, .* for a single task$"
    assert net(x, task=[0, 1, 0, 1]).shape == (4, 3)
    assert [bias.shape for bias in body.seen] == [part.merged(1).bias.shape for part in layers]
    for bias in body.seen:  # of each task another, so that there is nothing to compute with
        with pytest.raises(rankup.TaskStateError, match=alone):
            bias.sum()
    for read in (lambda: body.conv.bias, lambda: body.head.weight, lambda: body.head.out_features):
        with pytest.raises(rankup.TaskStateError, match=alone):
            read()


class Asking(nn.Module):
    """Asks whether there is a bias, in a forward that can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.head((y.relu() if self.conv.bias is not None else y).mean((2, 3)))


def test_asking_for_bias_does_not_prevent_folding() -> None:
    net, x = rankup.grow(Asking(), Rank(2, 1)), torch.rand(4, 1, 8, 8)
    net.begin_task("a", 2)
    net.commit_task()
    torch.testing.assert_close(net.merged("a")(x), net.eval()(x, task="a"))


class Backbone(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU())
        self.mid, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.mid(self.backbone(x).mean((2, 3))).relu())
        return answer


@pytest.mark.parametrize("affine", [True, False])
def test_frozen_backbone_keeps_its_statistics(affine: bool, tmp_path: Path) -> None:
    module = Backbone(lambda channels: nn.BatchNorm2d(channels, affine=affine))
    for _ in range(20):
        module(5 + 2 * torch.randn(32, 3, 8, 8))
    module.backbone.requires_grad_(False)
    x = 5 + 2 * torch.randn(4, 3, 8, 8)
    given = module.eval().backbone(x)
    net = rankup.grow(module, rankup.Rank(2, 1), exclude=["backbone"])
    for mode in (net.train, net.eval):
        mode()
        net.begin_task(f"task {mode.__name__}", 3)
        net(x, task=len(net.tasks)).sum().backward()
        net.commit_task()
        assert torch.equal(net.body.get_submodule("backbone")(x), given)
    rankup.save(net, tmp_path)
    other = Backbone(lambda channels: nn.BatchNorm2d(channels, affine=affine))
    other.backbone.requires_grad_(False)
    again = rankup.load(tmp_path, other)
    assert torch.equal(again.body.get_submodule("backbone")(x), given)


def test_save_before_first_task_refuses_frozen_weights(
    tmp_path: Path,
) -> None:
    layers = nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    module = nn.Sequential(*layers)
    module[0].requires_grad_(False)
    net = rankup.grow(module, rankup.Rank(2, 1), exclude=["0"])
    with pytest.raises(rankup.RankupError, match=r"'0\.weight' came with the module"):
        rankup.save(net, tmp_path)
    net.begin_task("a", 3)
    net.commit_task()
    rankup.save(net, tmp_path)
    other = nn.Sequential(nn.Linear(16, 8), *layers[1:])
    other[0].requires_grad_(False)
    weight = rankup.load(tmp_path, other).body.get_submodule("0").weight
    assert torch.equal(weight, module[0].weight)  # type: ignore[arg-type]


def test_save_before_first_task_refuses_given_buffers(tmp_path: Path) -> None:
    net = tied()
    scale = net.body.get_submodule("embed").scale
    assert isinstance(scale, Tensor)
    with pytest.raises(rankup.RankupError, match=r"'embed\.scale' came with the module"):
        rankup.save(net, tmp_path)
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    rankup.save(rankup.grow(plain, Rank(2, 1), exclude=["1"]), tmp_path / "drawn")  # it draws them


@pytest.mark.parametrize("head", [None, "head"])
def test_module_that_cannot_be_copied_says_why(head: str | None) -> None:
    module = Backbone(nn.BatchNorm2d)
    module.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(rankup.RankupError, match="but the module cannot be copied: can"):
        rankup.grow(module, rankup.Rank(2, 1), head=head)
