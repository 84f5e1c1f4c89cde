"""HAT: gates on units that become bits, and weights that stay fixed if learned tasks need them."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankup
from helpers.rivals import answers, same
from helpers.zoo import Transformer
from rankup.data.streams import Stream, make_stream
from rankup.data.tasks import Task
from rankup.growing.options import GrowOptions
from rankup.layers import TaskNorm
from rankup.methods.hat import HardAttention, HatLearner
from rankup.rank import Rank
from rankup.testing import make_method
from rankup.training.engine.eager import Eager, Steps
from rankup.training.recipe import Recipe


class Between(nn.Module):
    """Between its layers, zeros become nonzero, and nonzero values are cancelled or hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 12), nn.Linear(12, 12), nn.Linear(24, 9)
        self.norm, self.head = nn.LayerNorm(9), nn.Linear(9, 10)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x.flatten(1))
        b = self.b(torch.sigmoid(a))
        both = torch.cat([torch.relu(-b), a - b], 1)
        logits: Tensor = self.head(torch.relu(self.norm(self.c(both))))
        return logits


class NormFirst(nn.Module):
    """Norms that are not the only readers of a convolution, and come before the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 16, 1), nn.Linear(16, 10)
        self.norm, self.groups = nn.BatchNorm2d(16), nn.GroupNorm(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(torch.relu(self.norm(a))) + a
        logits: Tensor = self.head(torch.relu(self.groups(b)).mean((2, 3)))
        return logits


class Rows(nn.Module):
    """A transformer that reads an image's rows as a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.rest = nn.Linear(8, 12), Transformer(12)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.rest(self.into(x.flatten(1, 2)))
        return logits


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: rankup.models.mlp(64, hidden=[24, 16]),
    "resnet18": lambda: rankup.models.resnet18(width=4, image_size=8, channels=1),
    "between": Between,
    "norm first": NormFirst,
    "transformer": Rows,
}


@pytest.fixture(scope="module")
def stream() -> Stream:
    stream = make_stream("p-digits", tasks=3)
    few = [replace(t, train_x=t.train_x[:192], train_y=t.train_y[:192]) for t in stream]
    return replace(stream, tasks=tuple(few))


def make(
    stream: Stream,
    net: str = "mlp",
    recipe: Recipe | None = None,
    **options: float,
) -> HardAttention:
    recipe = recipe or Recipe(batch=64, weight_decay=0.1, norms="fresh")
    method = make_method("hat", stream, NETS[net](), options=options, **asdict(recipe))
    assert isinstance(method, HardAttention)
    return method


def begin(method: HardAttention, task: Task) -> HatLearner:
    learner = method.begin(task)
    assert isinstance(learner, HatLearner)
    return learner


def know(method: HardAttention, *tasks: Task) -> None:
    """Tasks that end almost as they begin: each with about half of the units, at random."""
    for task in tasks:
        method.begin(task)
        for part in method.parts:
            if isinstance(part, TaskNorm):
                part.get_parameter("new_bias").data.fill_(0.5)
        method.end()


def train(steps: Steps, epochs: int) -> None:
    (learner,) = steps.learners
    feed = learner.feed
    for epoch in range(epochs):
        draws = learner.sample_epoch(torch.Generator(feed.device).manual_seed(epoch))
        steps.on_epoch_start(epoch)
        steps.epoch([draws], [[feed.recipe.lr] * feed.steps_per_epoch], epoch)
    steps.adopt()


def teach(method: HardAttention, task: Task, epochs: int) -> None:
    """Learn a task, well or not."""
    train(Eager([begin(method, task)]), epochs)
    method.end()


def shared(method: HardAttention) -> dict[str, nn.Parameter]:
    names = [f"{spec.name}.{key}" for spec in method.layers for key in ("weight", "bias")]
    return {name: p for name, p in method.body.named_parameters() if name in names}


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_old_answers_stay_under_weight_decay(optimiser: str, stream: Stream) -> None:
    recipe = Recipe(batch=32, optimiser=optimiser, lr=0.02, weight_decay=0.1)
    method, old = make(stream, "mlp", recipe), list[Tensor]()
    for task in stream:
        weights = [p.clone() for p in shared(method).values()]
        teach(method, task, 5)
        now = answers(method, stream)
        assert not old or same(old, now)
        assert not any(map(torch.equal, weights, shared(method).values()))  # free ones do learn
        old = now


@pytest.mark.parametrize("net", NETS)
def test_free_weights_matter_to_no_old_task(net: str, stream: Stream) -> None:
    method = make(stream, net)
    know(method, stream[0], stream[1])
    old = answers(method, stream)
    learner, draw = begin(method, stream[2]), torch.Generator().manual_seed(0)
    for name, parameter in shared(method).items():
        frozen = learner.frozen(f"body.{name}").expand_as(parameter)
        assert not frozen.all()
        other = torch.randn(parameter.shape, generator=draw)
        parameter.data = torch.where(frozen, parameter.data, other)
    assert same(old, answers(method, stream))


@pytest.mark.parametrize("net", NETS)
def test_frozen_weights_matter(net: str, stream: Stream) -> None:
    method = make(stream, net)
    know(method, stream[0])
    old = answers(method, stream)
    learner = begin(method, stream[1])
    for name, parameter in shared(method).items():
        weight = parameter.data
        frozen = learner.frozen(f"body.{name}").expand_as(weight)
        assert frozen.any()
        parameter.data = torch.where(frozen, weight * 1.5 + 0.1, weight)
        assert not same(old, answers(method, stream))
        parameter.data = weight


def in_use(method: HardAttention) -> dict[str, Tensor]:
    """By layer, the units that any learned task uses."""
    masks = [method.split(method.mask(task)) for task in range(method.learned)]
    return {name: masks[0][name] | masks[1][name] for name in masks[0]}


def test_weights_between_used_units_are_frozen(stream: Stream) -> None:
    method = make(stream)
    know(method, stream[0], stream[1])
    used, learner = in_use(method), begin(method, stream[2])
    inputs = torch.ones(64, dtype=torch.bool)
    for name in ("hidden.0", "hidden.1"):
        weight = learner.frozen(f"body.{name}.weight")
        for i, j in torch.cartesian_prod(torch.arange(len(used[name])), torch.arange(len(inputs))):
            assert weight[i, j] == (used[name][i] and inputs[j])
        assert torch.equal(learner.frozen(f"body.{name}.bias"), used[name])
        inputs = used[name]


def test_channels_in_use_spread_over_shortcuts(stream: Stream) -> None:
    method = make(stream, "resnet18")
    know(method, stream[0], stream[1])
    used, learner = in_use(method), begin(method, stream[2])

    def assert_frozen(name: str, inputs: Tensor) -> None:
        expected = torch.outer(used[name].float(), inputs.float()).bool()
        assert torch.equal(learner.frozen(f"body.{name}.weight"), expected[..., None, None])

    assert_frozen("stem", torch.ones(1))
    x = used["stem"]
    for number, block in enumerate(cast(nn.Sequential, method.body.get_submodule("blocks"))):
        name = f"blocks.{number}"
        assert_frozen(f"{name}.conv1", x)
        assert_frozen(f"{name}.conv2", used[f"{name}.conv1"])
        if isinstance(block.get_submodule("shortcut"), nn.Sequential):
            assert_frozen(f"{name}.shortcut.0", x)
            x = used[f"{name}.shortcut.0"]
        x = x | used[f"{name}.conv2"]
    assert not x.all()


def test_ungated_layers_freeze_after_the_first_task(stream: Stream) -> None:
    setting = make(stream, "between").setting
    method = HardAttention(replace(setting, grow_options=GrowOptions(Rank(3, 1), exclude=("b",))))
    for index, task in enumerate(stream):
        learner = begin(method, task)
        assert bool(learner.frozen("body.b.weight")) == bool(learner.frozen("body.b.bias"))
        assert bool(learner.frozen("body.b.weight")) == (index > 0)
        method.end()


def test_gates_follow_norms_and_close_to_zero(stream: Stream) -> None:
    method = make(stream, "resnet18")
    know(method, stream[0])
    seen: dict[str, Tensor] = {}
    for name, place in method.gated_parts.items():
        assert isinstance(place, TaskNorm)
        place.register_forward_hook(
            lambda part, args, output, name=name: seen.update({name: output})
        )
    answers(method, stream)
    for name, mask in method.split(method.mask(0)).items():
        assert torch.equal(seen[name].abs().amax((0, 2, 3)) > 0, mask)


@pytest.mark.parametrize("learned", [0, 2])
@pytest.mark.parametrize("slope", [1 / 400, 3.0, 40.0, 150.0])
def test_a_step_is_the_papers(slope: float, learned: int, stream: Stream) -> None:
    method = make(stream, strength=2.0)
    know(method, *stream.tasks[:learned])
    learner = begin(method, stream[2])
    draw = {k: v[0] for k, v in learner.sample_epoch(torch.Generator().manual_seed(0)).items()}
    draw["slope"] = torch.tensor(slope)
    with learner.bound({}):
        loss, found = learner.gradient(draw)
    grads = dict(zip(learner.learned(), found, strict=True))

    # The same in plain code and in float64.
    e = learner.embedding.detach().double().requires_grad_()
    weights = {
        name: p.detach().double().requires_grad_() for name, p in learner.body.named_parameters()
    }
    a = 1 / (1 + torch.exp(-slope * e))
    x = learner.feed.x[draw["rows"]].double().flatten(1) / 255
    for layer, gate in ((0, a[:24]), (1, a[24:])):
        x = x @ weights[f"hidden.{layer}.weight"].T + weights[f"hidden.{layer}.bias"]
        x = torch.relu(x) * gate
    logits = x @ weights["head.new_weight"].T + weights["head.new_bias"]
    before = torch.zeros(40)
    for task in range(learned):
        before = torch.maximum(before, method.mask(task).float())
    penalty = (a * (1 - before)).sum() / (1 - before).sum()
    wanted = F.cross_entropy(logits, stream[2].train_y[draw["rows"]]) + 2.0 * penalty
    by_e, *by_weights = torch.autograd.grad(wanted, [e, *weights.values()])
    cosh = torch.cosh((slope * e).clamp(-50, 50))
    compensated = by_e * 400 * (cosh + 1) / (slope * (torch.cosh(e) + 1))

    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(grads["embedding"].double(), compensated, rtol=1e-3, atol=1e-4)
    assert compensated.abs().max() > 0.1
    for name, expected in zip(weights, by_weights, strict=True):
        # Including frozen weights: whatever a step does to them, they are restored after it.
        torch.testing.assert_close(grads[f"body.{name}"].double(), expected, rtol=1e-3, atol=1e-6)


def test_gates_become_steeper_over_every_epoch(stream: Stream) -> None:
    learner = begin(make(stream, s_max=50.0), stream[0])
    slopes, steps = learner.sample_epoch(torch.Generator())["slope"], learner.feed.steps_per_epoch
    assert steps == 3
    for b in range(steps):  # the paper counts batches from 1
        assert slopes[b] == pytest.approx(1 / 50 + (50 - 1 / 50) * b / (steps - 1))
    whole = Recipe(batch=10_000)
    assert (
        begin(make(stream, recipe=whole), stream[0]).sample_epoch(torch.Generator())["slope"] == 400
    )


def test_embeddings_stay_within_six(stream: Stream) -> None:
    method = make(stream, recipe=Recipe(batch=64, optimiser="sgd", lr=30.0))
    learner = begin(method, stream[0])
    train(Eager([learner]), 1)
    assert learner.embedding.abs().max() == 6
    assert torch.equal(method.mask(0), learner.embedding > 0)


def test_without_free_units_heads_and_gates_learn(stream: Stream) -> None:
    method = make(stream, recipe=Recipe(epochs=20, batch=16))
    learner = begin(method, stream[0])
    learner.embedding.data.fill_(1)
    method.end()
    assert method.claimed().all()
    weights = {name: p.clone() for name, p in shared(method).items()}
    method.learn(stream[1], None, None)  # it would raise if the task was not learned
    assert method.learned == 2
    assert not method.mask(1).all()
    for name, parameter in shared(method).items():
        assert torch.equal(parameter, weights[name])


def test_a_mask_takes_a_bit_per_unit(stream: Stream) -> None:
    method = make(stream)
    for number in range(3):
        embedding = begin(method, stream[number]).embedding.detach().clone()
        method.end()
        assert torch.equal(method.mask(number), embedding > 0)
    assert method.kept["masks"].nbytes == 3 * (24 + 16) / 8
