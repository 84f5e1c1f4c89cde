"""Elastic weight consolidation does what its papers say."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankup
from helpers.zoo import blobs
from rankup import seeds
from rankup.data.streams import make_stream
from rankup.layers import active
from rankup.methods.ewc import EWC
from rankup.methods.shared.dense import DenseMethod
from rankup.testing import make_method
from rankup.training.batches import Feed
from rankup.training.engine.module import ModuleLearner
from rankup.training.engine.select import _signature
from rankup.training.recipe import Recipe

NETS = {
    "mlp": lambda: rankup.models.mlp(64, hidden=[32, 32]),
    "convolutions": lambda: nn.Sequential(
        *(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.Conv2d(6, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(24, 10)),
    ),
}
STREAM = make_stream("p-digits", tasks=3)
RECIPE = Recipe(epochs=2, batch=32)


def make(
    name: str = "ewc", net: nn.Module | None = None, recipe: Recipe = RECIPE, **options: Any
) -> Any:
    return make_method(name, STREAM, net, options=options, **asdict(recipe))


def shared(method: DenseMethod) -> Tensor:
    """All shared parameters in one vector."""
    return torch.cat([p.flatten() for p in method.shared_parameters().values()])


@pytest.mark.parametrize("net", NETS)
def test_without_strength_it_is_finetune_bit_for_bit(net: str) -> None:
    recipe = Recipe(epochs=2, batch=12)
    plain = make("finetune", NETS[net](), recipe)
    ewc = make("ewc", NETS[net](), recipe, strength=0.0, samples=40)
    for whole in STREAM:
        task = replace(whole, train_x=whole.train_x[:300], train_y=whole.train_y[:300])
        plain.learn(task, None, None)
        ewc.learn(task, None, None)
    assert float(ewc.kept["importance"].max()) > 0
    ours, theirs = ewc.body.state_dict(), plain.body.state_dict()  # running statistics included
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


class Tiny(nn.Module):
    """A batch norm, whose training mode would mix samples, between two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.norm(self.a(x))))))


class Twice(nn.Module):
    """Runs one layer twice, another on each half of a sample, and a third without using it."""

    def __init__(self) -> None:
        super().__init__()
        self.halves, self.again, self.vain = nn.Linear(3, 4), nn.Linear(8, 8), nn.Linear(8, 2)
        self.once, self.head = nn.Linear(8, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.halves(x.view(-1, 2, 3))).flatten(1)
        x = torch.tanh(self.again(torch.tanh(self.again(x))))
        self.vain(x)
        return self.head(torch.tanh(self.once(x)))


def opened(samples: int = 60, net: type[nn.Module] = Tiny) -> tuple[EWC, Feed]:
    """A tiny network with a task learned and another begun."""
    ewc: EWC = make(net=net(), recipe=Recipe(epochs=8, batch=16, lr=0.03), samples=samples)
    ewc.learn(blobs(0, 6), None, None)
    return ewc, ewc.begin(blobs(1, 6, samples=samples)).feed


def squared_gradient(ewc: EWC, x: Tensor, label: Tensor) -> Tensor:
    body = ewc.body.eval()
    head = {id(p) for p in ewc.head.parameters()}
    own = [p for p in body.parameters() if id(p) not in head]
    with active(1):
        likelihood = -F.cross_entropy(body(x), label)
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(likelihood, own, materialize_grads=True)]
    ).square()


@pytest.mark.parametrize(("net", "products"), [(Tiny, {"a", "b"}), (Twice, {"once", "vain"})])
def test_importance_is_the_mean_squared_gradient(
    net: type[nn.Module], products: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ewc, feed = opened(net=net)
    made = set()

    def add(squares: dict[str, Tensor], x: Tensor, labels: Tensor, but: set[str]) -> None:
        made.update({name.split(".")[0] for name in but})
        EWC._add_squares(ewc, squares, x, labels, but)

    monkeypatch.setattr(ewc, "_add_squares", add)
    importance = ewc.importance(feed)
    assert not importance.requires_grad
    (x,) = feed.sample(60, seeds.generator(0, "importance", 1))
    with torch.no_grad():
        answers = ewc.predict(x, 1).softmax(1)
    labels = answers.multinomial(1, generator=seeds.generator(0, "importance labels", 1))[:, 0]
    one_by_one = [squared_gradient(ewc, x[n : n + 1], labels[n : n + 1]) for n in range(60)]
    torch.testing.assert_close(importance, torch.stack(one_by_one).mean(0), rtol=1e-4, atol=1e-8)
    assert made == products
    of_the_batch = squared_gradient(ewc, x, labels)
    assert float(importance.sum()) > 5 * float(of_the_batch.sum())


def test_importance_in_parts_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ewc, feed = opened()
    whole = ewc.importance(feed)
    monkeypatch.setattr("rankup.methods.ewc._BYTES", 7 * 4 * whole.numel())
    torch.testing.assert_close(ewc.importance(feed), whole, rtol=1e-5, atol=1e-9)


def test_importance_where_vmap_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ewc, feed = opened(net=Twice)
    whole, tried = ewc.importance(feed), list[object]()

    def fails(*_: object, **__: object) -> object:
        tried.append(1)
        raise RuntimeError("view size is not compatible with input tensor's size and stride")

    monkeypatch.setattr("rankup.methods.ewc.vmap", fails)
    torch.testing.assert_close(ewc.importance(feed), whole, rtol=1e-5, atol=1e-9)
    assert tried


def test_labels_are_drawn_from_the_network() -> None:
    """Many draws come close to the expectation over the network's answers, not to what the data's
    labels give."""
    ewc, feed = opened(samples=2000)
    importance = ewc.importance(feed)
    x, y = next(feed.train(2000))
    with torch.no_grad():
        answers = ewc.predict(x, 1).softmax(1)
    expected, of_labels = torch.zeros_like(importance), torch.zeros_like(importance)
    for n in range(0, 2000, 8):  # each eighth sample
        each = [squared_gradient(ewc, x[n : n + 1], torch.tensor([c])) for c in range(3)]
        expected += (answers[n][:, None] * torch.stack(each)).sum(0) / 250
        of_labels += each[int(y[n])] / 250
    apart = (importance - expected).norm() / expected.norm()
    assert float(apart) < 0.1
    assert float((of_labels - expected).norm() / expected.norm()) > 5 * float(apart)


def test_the_importance_pass_changes_nothing() -> None:
    ewc, feed = opened()
    before = {name: tensor.clone() for name, tensor in ewc.body.state_dict().items()}
    state = torch.get_rng_state()
    first = ewc.importance(feed)
    assert ewc.body.training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(ewc.importance(feed), first)
    for name, tensor in ewc.body.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("anchors", ["latest", "all"])
def test_penalty_is_a_spring_on_every_shared_weight(anchors: str) -> None:
    ewc = make(strength=30.0, samples=50, anchors=anchors)
    importances, weights = [], []
    for task in STREAM.tasks[:2]:
        before = ewc.kept.get("importance", 0)
        ewc.learn(task, None, None)
        importances.append(ewc.kept["importance"] - before)
        weights.append(shared(ewc))
    held = ewc.begin(STREAM[2])
    free = ModuleLearner(ewc.body, held.feed, 2)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ewc.body.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=noise)
    now = shared(ewc)
    draw = {k: entries[0] for k, entries in free.sample_epoch(noise).items()}
    found = []
    for learner in (held, free):
        with learner.bound({}):
            found.append(learner.gradient(draw))
    (loss, grads), (plain_loss, plain_grads) = found

    springs = [(importances[0] + importances[1], weights[1])]
    if anchors == "all":
        springs = list(zip(importances, weights, strict=True))
    force = torch.stack([30.0 * stiff * (now - at) for stiff, at in springs]).sum(0)
    added = {
        name: own - plain
        for name, own, plain in zip(held.learned(), grads, plain_grads, strict=True)
    }
    assert not any(added.pop(f"body.head.new_{key}").any() for key in ("weight", "bias"))
    all_added = torch.cat([own.flatten() for own in added.values()])
    torch.testing.assert_close(all_added, force, rtol=1e-3, atol=1e-6)
    if anchors == "latest":  # with several anchors, the loss omits a constant
        energy = 30.0 / 2 * (springs[0][0] * (now - weights[1]).square()).sum()
        torch.testing.assert_close(loss - plain_loss, energy, rtol=1e-4, atol=1e-6)


def test_old_importance_fades() -> None:
    whole, faded = make(samples=50), make(samples=50, gamma=0.25, strength=0.0)
    fresh = make(samples=50, gamma=0.0, strength=0.0)
    for method in (whole, faded, fresh):
        method.learn(STREAM[0], None, None)
    first = whole.kept["importance"]
    for method in (faded, fresh):
        assert torch.equal(method.kept["importance"], first)
        method.learn(STREAM[1], None, None)
    expected = 0.25 * first + fresh.kept["importance"]
    torch.testing.assert_close(faded.kept["importance"], expected)


def test_important_weights_hardly_move() -> None:
    """The 1 % that matter most to the first task, in the second one. Gradient descent, because
    Adam's steps are as large where springs are stiff as where they are slack."""
    recipe = Recipe(epochs=3, batch=32, optimiser="sgd", lr=0.1)
    first = make(recipe=recipe, samples=200)
    first.learn(STREAM[0], None, None)
    importance = first.kept["importance"]
    stable = 1 / (recipe.lr * float(importance.max()))  # from 2 / … on a spring is unstable
    most = importance.topk(len(importance) // 100).indices
    moved = []
    for method in (
        make(recipe=recipe, samples=200, strength=stable),
        make("finetune", recipe=recipe),
    ):
        method.learn(STREAM[0], None, None)
        before = shared(method)
        method.learn(STREAM[1], None, None)
        moved.append((shared(method) - before).abs())
    held, free = moved
    assert float(held[most].mean()) < 0.1 * float(free[most].mean())
    assert float(held[most].norm()) < 0.1 * float(free[most].norm())
    assert float(held.mean()) > 0.3 * float(free.mean())  # all others are free to learn


def test_learners_of_different_classes_share_no_graph() -> None:
    class Other(ModuleLearner):
        pass

    body, feed = nn.Linear(6, 3), Feed(blobs(0, 6), Recipe(), torch.device("cpu"))
    plain, again, other = (kind(body, feed, 0) for kind in (ModuleLearner, ModuleLearner, Other))
    assert _signature(plain) == _signature(again) != _signature(other)
