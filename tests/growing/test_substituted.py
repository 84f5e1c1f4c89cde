"""Layers that run their own forward with a task's tensors keep every promise."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankup
from helpers.zoo import assert_same_bits, logits, relative_error
from rankup.rank import Rank

F64 = torch.float64


class OwnNorm(nn.LayerNorm):
    """As timm writes its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class NormAct(nn.BatchNorm2d):
    """A batch norm with an activation after it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Standardised(nn.Conv2d):
    """A convolution that scales its own weight, with a gain for each output."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__(channels, outputs, 3, padding=1)
        self.gain = nn.Parameter(torch.ones(outputs, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight * self.gain, self.bias, padding=1)


class Conv1D(nn.Module):
    """A Linear with its inputs in the first dimension, as in GPT-2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Experts(nn.Module):
    """A mean of products with matrices that lie in one parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bti,eoi->bto", x, self.up)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int) -> None:
        super().__init__()
        self.inner = kind(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Net(nn.Module):
    """A layer of interest between a plain one and the head."""

    def __init__(self, layer: nn.Module, over: str) -> None:
        super().__init__()
        images = over == "images"
        self.into: nn.Module = nn.Conv2d(3, 8, 3, padding=1) if images else nn.Linear(5, 8)
        self.layer, self.over = layer, over
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.into(x).tanh())
        return self.head(y.mean((2, 3)) if self.over == "images" else y.mean(1))


LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a norm of its own": (lambda: OwnNorm(8), "sequences"),
    "a batch norm with activation": (lambda: NormAct(8), "images"),
    "a batch norm without affine": (lambda: NormAct(8, affine=False), "images"),
    "a grouped convolution": (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=2), "images"),
    "a depthwise convolution": (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), "images"),
    "a transposed convolution": (lambda: nn.ConvTranspose2d(8, 8, 2), "images"),
    "a standardised convolution": (lambda: Standardised(8, 8), "images"),
    "transformers' Conv1D": (lambda: Conv1D(8, 8), "sequences"),
    "a layer scale": (lambda: LayerScale(8), "sequences"),
    "experts": (lambda: Experts(8), "sequences"),
    "attention": (lambda: Attention(8), "sequences"),
    "an encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        "sequences",
    ),
    "an LSTM": (lambda: Recurrent(nn.LSTM, 8), "sequences"),
    "a GRU": (lambda: Recurrent(nn.GRU, 8), "sequences"),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    layer, over = LAYERS[name]
    return Net(layer(), over).to(F64)


def inputs(name: str, seed: int = 0) -> Tensor:
    shape = (3, 6, 6) if LAYERS[name][1] == "images" else (4, 5)
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(8, *shape, generator=rng, dtype=F64)


def learn(net: rankup.IncrementalNet, task: str, x: Tensor, classes: int) -> None:
    net.train()
    net.begin_task(task, classes)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.02)
    labels = torch.arange(len(x)) % classes
    for _ in range(4):
        optimiser.zero_grad()
        F.cross_entropy(net(x, task=task), labels).backward()
        optimiser.step()


def taught(name: str, base: str) -> rankup.IncrementalNet:
    net = rankup.grow(make(name), Rank(1, 1), base=base, head="head")  # type: ignore[arg-type]
    for index, classes in enumerate((2, 3)):
        learn(net, f"task {index}", inputs(name, index), classes)
        net.commit_task(calibrate=[inputs(name, index)])
    return net.eval()


@pytest.mark.parametrize("name", LAYERS)
def test_every_parameter_learns_and_matters(name: str) -> None:
    net, x = rankup.grow(make(name), Rank(1, 1), base="keep", head="head"), inputs(name)
    learn(net, "a", x, 2)
    answer = net(x, task="a")
    answer.square().sum().backward()
    for key, parameter in net.named_parameters():
        assert parameter.grad is not None, key
        if ".into." in key or key.endswith(("k_proj_bias", "in_proj_bias")):
            continue  # shifts that a softmax or a batch norm may undo
        before = parameter.detach().clone()
        parameter.data += 0.1 * torch.randn_like(parameter)
        assert not torch.equal(net(x, task="a"), answer), key
        parameter.data = before


@pytest.mark.parametrize("base", ["new", "keep"])
@pytest.mark.parametrize("name", LAYERS)
def test_promises_hold(name: str, base: str, tmp_path: Path) -> None:
    net, x = taught(name, base), inputs(name, seed=9)
    before = logits(net, x)
    learn(net, "later", inputs(name, 5), 4)
    net.commit_task(calibrate=[inputs(name, 5)])
    assert_same_bits(before, logits(net.eval(), x))
    net(x, task=0), net(x, task=1)  # nothing is kept from one task for another
    assert torch.equal(net(x, task=0), before[0])
    for task, answer in enumerate(logits(net, x)):
        merged = net.merged(task)
        assert type(merged.layer) is type(make(name).layer)
        assert relative_error(merged(x), answer) < 1e-10
        assert merged.state_dict().keys() == make(name).state_dict().keys()
    tasks = torch.arange(len(x)) % 3
    mixed = net(x, task=tasks)
    for row, task in enumerate(tasks.tolist()):
        alone = net(x[row : row + 1], task=task)[0]
        torch.testing.assert_close(mixed[row, : len(alone)], alone)
        assert (mixed[row, len(alone) :] == -torch.inf).all()
    rankup.save(net, tmp_path)
    assert rankup.verify(tmp_path)
    loaded = rankup.load(tmp_path, module=make(name))
    assert_same_bits(logits(net, x), logits(loaded, x))


@pytest.mark.parametrize("name", [name for name in LAYERS if "batch norm" not in name])
def test_kept_base_answers_as_given_before_learning(name: str) -> None:
    module, x, features = make(name).eval(), inputs(name), list[Tensor]()
    net = rankup.grow(module, Rank(1, 1), base="keep", head="head")
    net.begin_task("a", 3)
    for head in (module.head, net.body.head):
        head.register_forward_pre_hook(lambda _, args: features.append(args[0]))
    module(x), net.eval()(x, task="a")
    torch.testing.assert_close(*features)


def test_threads_run_different_tasks() -> None:
    net, x = taught("attention", "keep"), inputs("attention", seed=9)
    expected, wrong = logits(net, x), list[int]()

    def ask(task: int) -> None:
        with torch.no_grad():
            wrong.extend(task for _ in range(100) if not torch.equal(net(x, task), expected[task]))

    threads = [threading.Thread(target=ask, args=(index % 2,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tokens_and_embeddings_are_shared() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.cls_token = nn.Embedding(9, 8), nn.Parameter(torch.zeros(1, 1, 8))
            self.pos_embed, self.gain = nn.Parameter(torch.zeros(1, 5, 8)), LayerScale(8)
            self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.words(x)], 1)
            return self.head(self.mix(self.gain(x + self.pos_embed))[:, 0])

    net = rankup.grow(Tokens(), Rank(2, 1), base="keep")
    assert {name for name, _ in net.plan.dense.tensors} == {
        "words.weight",
        "cls_token",
        "pos_embed",
    }
    net.begin_task("a", 3)
    assert not any("token" in name or "words" in name for name, _ in net.named_parameters())
