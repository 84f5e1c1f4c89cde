"""Tasks see the last hidden layer in orthogonal subspaces, and weights may stay orthonormal."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankup
from helpers.zoo import GPU
from rankup.data.streams import Stream, make_stream
from rankup.data.tasks import Task
from rankup.layers import active
from rankup.methods import METHODS
from rankup.methods.orthog import Orthog, OrthogLearner, _matrix, inverse_roots, tangent
from rankup.testing import make_method
from rankup.training.engine.cuda_graph import Graph
from rankup.training.engine.eager import Eager
from rankup.training.engine.select import Engine
from rankup.training.loop import learn
from rankup.training.recipe import Recipe

BASES = ["orthogonal", "identity"]


def small(seed: int = 0, tasks: int = 3) -> Stream:
    """Images of three classes each."""
    draw, made = torch.Generator().manual_seed(seed), []
    for number in range(tasks):
        y = torch.arange(96) % 3
        centres = torch.rand(3, 1, 6, 6, generator=draw)
        x = 0.8 * centres[y] + 0.2 * torch.rand(96, 1, 6, 6, generator=draw)
        made.append(Task(f"{number}", 3, x, y, x, y))
    return Stream("small", tuple(made))


def mlp() -> nn.Module:
    """A layer with more outputs than inputs, and one with fewer."""
    return rankup.models.mlp(36, hidden=[40, 12])


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 5, 3),
        nn.ReLU(),
        nn.Conv2d(5, 12, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(192, 3),
    )


def make(
    module: Callable[[], nn.Module],
    stream: Stream,
    seed: int = 0,
    device: str = "cpu",
    recipe: Recipe | None = None,
    **options: object,
) -> Any:
    chosen = recipe or Recipe(**{"epochs": 3, "batch": 16, **METHODS["orthog"].recipe})
    net, options = module().to(device), {"replay": 8, **options}
    return make_method("orthog", stream, net, options=options, seed=seed, **asdict(chosen))


def projections(method: Orthog, width: int) -> Tensor:
    """Every task's P, as a matrix to multiply rows by."""
    found = []
    for task in range(len(method.setting.tasks)):
        with active(task):
            found.append(method.subspaces.project(torch.eye(width)))
    return torch.stack(found)


def orthonormality(method: Orthog) -> float:
    """The largest error of any weight that should be orthonormal."""
    matrices = [_matrix(method.body.get_parameter(name).detach()) for name in method.orthonormal]
    assert matrices
    assert all(len(m) <= m.shape[1] for m in matrices)
    return max(float((m @ m.T - torch.eye(len(m)).to(m)).abs().max()) for m in matrices)


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize(("width", "tasks", "rank"), [(256, 20, 12), (160, 20, 8), (12, 3, 4)])
def test_subspaces_are_orthogonal_and_of_equal_rank(
    width: int, tasks: int, rank: int, basis: str
) -> None:
    method = make(lambda: rankup.models.mlp(36, hidden=[width]), small(tasks=tasks), basis=basis)
    P = projections(method, width).double()
    assert torch.linalg.matrix_rank(P, atol=1e-3, hermitian=True).tolist() == [rank] * tasks
    torch.testing.assert_close(P, P.mT, rtol=0, atol=1e-6)
    once = P @ torch.randn(width, 16, dtype=P.dtype, generator=torch.Generator().manual_seed(0))
    for one in range(tasks):
        twice = P[one] @ once  # after each of the others, and after itself
        for other in range(tasks):
            expected = once[one] if one == other else torch.zeros_like(once[one])
            torch.testing.assert_close(twice[other], expected, rtol=0, atol=1e-5)
    is_diagonal = torch.equal(P[0], torch.diag(P[0].diagonal()))
    assert is_diagonal == (basis == "identity")


def test_subspaces_come_from_the_seed_and_are_not_stored() -> None:
    stream = small()
    recipe = Recipe(epochs=20, batch=16, **METHODS["orthog"].recipe)
    one, again, other = (make(mlp, stream, seed, recipe=recipe) for seed in (1, 1, 2))
    assert torch.equal(projections(one, 12), projections(again, 12))
    assert not torch.allclose(projections(one, 12), projections(other, 12))
    for task in stream:
        one.learn(task, None, None)
    assert one.footprint().parameters == 36 * 40 + 40 + 40 * 12 + 12 + 3 * (12 * 3 + 3)
    assert one.footprint().buffer == 3 * 3 * 5 * 36  # these images are of floats


def test_a_layer_that_is_too_narrow_is_refused() -> None:
    with pytest.raises(rankup.RankupError, match="at least the number of tasks, 13, got 12"):
        make(mlp, small(tasks=13))


@pytest.mark.parametrize("module", [mlp, conv])
def test_orthonormal_weights_need_sgd(
    module: Callable[[], nn.Module],
) -> None:
    make(module, small(), recipe=Recipe(optimiser="adam"), stiefel="no")
    with pytest.raises(rankup.RankupError, match="orthonormal, so it needs .* sgd, not adam"):
        make(module, small(), recipe=Recipe(optimiser="adam"), stiefel="yes")


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.head = nn.Linear(36, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)

    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x.flatten(1)))


class Normed(Features):
    """A norm before the last ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(x)))


class Smooth(Features):
    """No ReLU at all."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.hidden(x)))


class Twice(Features):
    """Something else reads the layer before the last ReLU, too."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.hidden(x)
        return self.head(torch.relu(y)) + 0 * y.sum()


def through(module: nn.Module, x: Tensor, P: Tensor) -> Tensor:
    """What the head should see, written out."""
    if isinstance(module, rankup.models.MLP):
        first, last = module.hidden
        return torch.relu(last(torch.relu(first(x.flatten(1)))) @ P)
    if isinstance(module, rankup.models.ResNet18):
        pooled = module.blocks(torch.relu(module.norm(module.stem(x)))).mean((2, 3))
        return torch.relu(pooled @ P)
    if isinstance(module, nn.Sequential):
        return torch.relu(module[:5](x) @ P)
    assert isinstance(module, Features)
    if isinstance(module, Normed):
        return torch.relu(module.hidden(x) @ P)
    between = F.gelu if isinstance(module, Smooth) else torch.relu
    return torch.relu(between(module.hidden(x)) @ P)


PLACES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mlp": (mlp, 12),
    "resnet18": (lambda: rankup.models.resnet18(width=2, image_size=6, channels=1), 16),
    "conv": (conv, 192),
    "normed": (Normed, 12),
    "smooth": (Smooth, 12),
    "twice": (Twice, 12),
}


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("place", PLACES)
def test_features_are_projected_before_the_last_relu(place: str, basis: str) -> None:
    module, width = PLACES[place]
    stream = small()
    method = make(module, stream, basis=basis)
    method.begin(stream[0])
    weight = nn.init.normal_(method.head.weight.data)  # as if all heads had begun
    P, x = projections(method, width), stream[1].test_x
    mixed = torch.arange(len(x)) % 3
    expected = []
    plain = make(module, stream, basis=basis)
    plain.body.load_state_dict(method.body.state_dict())
    for part in plain.body.modules():  # the same network, with no projection in it
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    plain.body.eval()
    with torch.no_grad():
        for task in range(3):
            seen = through(plain.body, x, P[task])
            own = seen @ weight[3 * task : 3 * task + 3].T
            torch.testing.assert_close(method.predict(x, task), own, rtol=1e-4, atol=1e-5)
            assert not torch.allclose(plain.predict(x, task), own, atol=1e-2)
            expected.append(own)
        with active(mixed):  # a task per sample, as in a step with replay
            found = method.body.eval()(x)
    wanted = torch.stack(expected)[mixed, torch.arange(len(x))]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_gradients_of_tasks_are_orthogonal() -> None:
    stream = small()
    method = make(mlp, stream)
    method.begin(stream[0])
    nn.init.normal_(method.head.weight.data)
    P = projections(method, 12)
    grads = []
    for task in range(3):
        bias = method.body.hidden[1].bias  # its gradient is the sum of the features'
        with active(task):
            loss = F.cross_entropy(method.body(stream[task].train_x), stream[task].train_y)
        grads.append(torch.autograd.grad(loss, bias)[0])
        torch.testing.assert_close(grads[-1] @ P[task], grads[-1], rtol=0, atol=1e-6)
    for one in range(3):
        assert float(grads[one].norm()) > 1e-3
        for other in range(one):
            assert abs(float(grads[one] @ grads[other])) < 1e-7


def test_step_descends_on_batch_and_memory() -> None:
    assert METHODS["orthog"].recipe["optimiser"] == "sgd"
    stream = small()
    method = make(mlp, stream)
    for task in stream.tasks[:2]:
        method.learn(task, None, None)
    learner = method.begin(stream[2])
    assert isinstance(learner, OrthogLearner)
    drawn = learner.sample_epoch(torch.Generator().manual_seed(0))
    assert drawn["memory"].shape == (6, 8)
    assert int(drawn["memory"].max()) < 2 * 3 * 5  # of the two tasks before
    draw = {name: entries[0] for name, entries in drawn.items()}
    total = torch.zeros(())
    for row in draw["rows"]:
        with active(2):
            total = total + F.cross_entropy(
                method.body(stream[2].train_x[row, None]), stream[2].train_y[row, None]
            )
    for slot in draw["memory"].tolist():
        task, label = slot // 15, slot % 15 // 5
        with active(task):
            logits = method.body(method.buffer["images"][slot, None])
        total = total + F.cross_entropy(logits, torch.tensor([label]))
    expected = torch.autograd.grad(total / 24, list(learner.learned().values()))
    before = {name: p.detach().clone() for name, p in learner.learned().items()}
    steps = Eager([learner])
    steps.epoch([{name: entries[:1] for name, entries in drawn.items()}], [[0.25]], 0)
    steps.adopt()
    for (name, parameter), grad in zip(learner.learned().items(), expected, strict=True):
        torch.testing.assert_close(parameter, before[name] - 0.25 * grad, rtol=1e-4, atol=1e-6)


def test_without_a_memory_nothing_is_replayed_or_stored() -> None:
    stream = make_stream("p-digits", tasks=3)
    method = make(lambda: rankup.models.mlp(64, hidden=[12]), stream, memory=0)
    for task in stream.tasks[:2]:
        method.learn(task, None, None)
    assert method.footprint().buffer == 0
    assert "memory" not in method.begin(stream[2]).sample_epoch(torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("module", "stiefel", "expected"),
    [
        (mlp, "auto", []),
        (mlp, "no", []),
        (mlp, "yes", ["hidden.0.weight", "hidden.1.weight"]),
        (conv, "auto", ["0.weight", "2.weight"]),
        (conv, "yes", ["0.weight", "2.weight"]),
        (conv, "no", []),
    ],
)
def test_which_weights_are_orthonormal(
    module: Callable[[], nn.Module], stiefel: str, expected: list[str]
) -> None:
    method = make(module, small(), stiefel=stiefel)
    assert method.orthonormal == expected
    if expected:
        assert orthonormality(method) < 1e-6  # from the beginning
        other = make(module, small(), stiefel=stiefel, seed=1)
        for name in expected:
            one, two = (m.body.get_parameter(name) for m in (method, other))
            assert not torch.allclose(one, two)


@pytest.mark.parametrize("module", [mlp, conv])
def test_steps_are_along_the_manifold(module: Callable[[], nn.Module]) -> None:
    stream = small()
    method = make(module, stream, stiefel="yes")
    learner = method.begin(stream[0])
    drawn = learner.sample_epoch(torch.Generator().manual_seed(0))
    draw = {name: entries[0] for name, entries in drawn.items()}
    plain = torch.autograd.grad(learner(draw), list(learner.learned().values()))
    with learner.bound({}):
        _, found = learner.gradient(draw)
    for (name, weight), grad, own in zip(learner.learned().items(), plain, found, strict=True):
        on = name.removeprefix("body.") in method.orthonormal
        assert torch.equal(own, tangent(weight.detach(), grad) if on else grad)
        assert torch.equal(own, grad) != on


@pytest.mark.parametrize("module", [mlp, conv])
def test_weights_stay_orthonormal_over_many_steps(module: Callable[[], nn.Module]) -> None:
    stream = small()
    method = make(module, stream, stiefel="yes")
    before = {name: method.body.get_parameter(name).detach().clone() for name in method.orthonormal}
    learner = method.begin(stream[0])
    steps, count = Eager([learner]), 0
    while count < 300:
        drawn = learner.sample_epoch(torch.Generator().manual_seed(count))
        steps.epoch([drawn], [[0.1] * 6], 0)
        count += 6
    steps.adopt()
    assert orthonormality(method) < 1e-5
    for name, start in before.items():
        assert float((method.body.get_parameter(name).detach() - start).norm()) > 0.1


@pytest.mark.parametrize("length", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("shape", [(256, 784), (160, 160, 3, 3), (40, 20, 1, 1), (24, 24)])
def test_a_step_ends_at_the_nearest_orthonormal_weight(
    shape: tuple[int, ...], length: float
) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = nn.init.orthogonal_(torch.empty(shape), generator=draw)
    along = tangent(weight, torch.randn(shape, generator=draw))
    W, step = _matrix(weight), _matrix(along)
    torch.testing.assert_close(
        W @ step.T + step @ W.T, torch.zeros(len(W), len(W)), rtol=0, atol=3e-5
    )
    moved = W + length * step / torch.linalg.matrix_norm(step, 2)
    found = inverse_roots((moved @ moved.T)[None])[0] @ moved
    left, _, right = torch.linalg.svd(moved.double(), full_matrices=False)
    torch.testing.assert_close(found.double(), left @ right, rtol=0, atol=1e-5)
    assert float((found @ found.T - torch.eye(len(W))).abs().max()) < 1e-5


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (5, 5), (3, 2, 2, 2)])
def test_the_tangent_is_the_nearest_to_the_gradient(shape: tuple[int, ...]) -> None:
    """It is a projection: the remainder is orthogonal to all directions along the manifold, which
    are by definition those that keep W Wᵀ."""
    draw = torch.Generator().manual_seed(0)
    weight = nn.init.orthogonal_(torch.empty(shape, dtype=torch.float64), generator=draw)
    grad = torch.randn(shape, dtype=torch.float64, generator=draw)
    W = _matrix(weight)

    def change(flat: Tensor) -> Tensor:
        step = flat.view(W.shape)
        return (step @ W.T + W @ step.T).flatten()

    constraint = torch.func.jacrev(change)(torch.zeros(W.numel(), dtype=torch.float64))
    off = torch.linalg.pinv(constraint) @ constraint  # projects onto what leaves the manifold
    flat = _matrix(grad).flatten()
    expected = (flat - off @ flat).view(W.shape)
    torch.testing.assert_close(_matrix(tangent(weight, grad)), expected)


@GPU
@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
@pytest.mark.parametrize("module", [mlp, conv])
def test_captured_steps_stay_on_the_manifold(
    module: Callable[[], nn.Module], precision: str
) -> None:
    stream = small().to("cuda")
    recipe = Recipe(epochs=56, batch=16, precision=precision, **METHODS["orthog"].recipe)
    method = make(module, stream, device="cuda", recipe=recipe, stiefel="yes")
    engine, graphs = Engine(), set[object]()  # not their ids: addresses are reused
    for index, task in enumerate(stream):
        assert learn([method], [task], engine) == [None]
        assert isinstance(engine._graph, Graph)
        graphs.add(engine._graph)
        right = method.predict(task.test_x, index).argmax(1) == task.test_y
        assert float(right.float().mean()) > 0.9
    assert len(graphs) == 2  # the first task has nothing to replay
    assert orthonormality(method) < 1e-5
