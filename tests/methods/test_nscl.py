"""Adam-NSCL does what its paper says."""

import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankup
from helpers.zoo import blobs
from rankup.data.streams import make_stream
from rankup.growing.options import GrowOptions
from rankup.methods.base import Method
from rankup.methods.nscl import NSCL, main_directions, null_space, packed, unpacked
from rankup.methods.shared.dense import DenseMethod
from rankup.methods.shared.spaces import (
    Confined,
    ConfinedLearner,
    Within,
    Without,
    add_covariance,
    add_directions,
    as_matrix,
    inputs,
)
from rankup.rank import Rank
from rankup.testing import make_method
from rankup.training.batches import Feed
from rankup.training.engine.eager import Eager
from rankup.training.recipe import Recipe

F64 = torch.float64
GROWTH = GrowOptions(Rank(3, 1), exclude=("scale",))
STREAM = make_stream("p-digits", tasks=3)
RECIPE = Recipe(epochs=4, batch=32)


def make(
    name: str = "nscl", net: nn.Module | None = None, recipe: Recipe = RECIPE, **options: Any
) -> Any:
    return make_method(name, STREAM, net, options=options, **asdict(recipe))


def hidden(method: DenseMethod) -> dict[str, nn.Linear]:
    return {n: m for n, m in method.body.named_modules() if isinstance(m, nn.Linear)}


def matrices(method: DenseMethod) -> list[Tensor]:
    return [as_matrix(layer) for layer in hidden(method).values()]


def layer_inputs(method: DenseMethod, task: rankup.Task) -> dict[str, Tensor]:
    """Each hidden layer's inputs for a task's training data in an MLP, with the 1 of its bias."""
    ((x, _),) = Feed(task, RECIPE, torch.device("cpu")).train(2048)
    rows = x.flatten(1)
    found = {}
    for name, layer in hidden(method).items():
        found[name] = torch.cat([rows, torch.ones(len(rows), 1)], 1).double()
        rows = torch.relu(layer(rows)).detach()
    return found


def brute_cut(gram: Tensor, energy: float) -> int:
    """How many of the smallest eigenvalues hold no more than that share of the energy."""
    values, cut, held = torch.linalg.eigvalsh(gram).clamp(min=0).tolist(), 0, 0.0
    while cut < len(values) and held + values[cut] <= energy * sum(values):
        held += values[cut]
        cut += 1
    return cut


@pytest.mark.parametrize("energy", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_it_projects_onto_the_directions_of_least_energy(energy: float) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(50, 20, generator=draw, dtype=F64) * torch.logspace(0, -3, 20, dtype=F64)
    x[:, 15:] = x[:, :5] @ torch.randn(5, 5, generator=draw, dtype=F64)
    gram = x.t() @ x
    projection = null_space(gram, energy)
    assert projection.dtype == F64
    torch.testing.assert_close(projection, projection.t(), rtol=0, atol=1e-12)
    torch.testing.assert_close(projection @ projection, projection, rtol=0, atol=1e-12)
    # Five directions hold nothing, except for rounding.
    rank = {0.0: 5, 1.0: 20}.get(energy) or brute_cut(gram, energy)
    assert round(float(projection.trace())) == rank
    cut = torch.linalg.svdvals(x).flip(0)[:rank]
    assert float((x @ projection).norm()) <= float(cut.norm()) * (1 + 1e-9) + 1e-9
    if 0 < energy < 1:
        assert 5 < rank < 20


CONVOLUTIONS = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "bias": False},
    {"kernel_size": (2, 3), "stride": (1, 2), "padding": (0, 2), "dilation": (2, 1)},
    {"kernel_size": 1, "stride": 2, "bias": False},
    {"kernel_size": 3, "padding": "same", "dilation": 2},
    {"kernel_size": 3, "padding": 2, "padding_mode": "circular"},
    {"kernel_size": 2, "padding": "same", "padding_mode": "reflect"},
]


OVER = {nn.Conv1d: (7,), nn.Conv2d: (7, 6), nn.Conv3d: (5, 4, 6)}


@pytest.mark.parametrize("kind", OVER)
@pytest.mark.parametrize("options", CONVOLUTIONS)
def test_a_convolution_is_a_matrix_times_its_inputs(
    options: dict[str, Any], kind: type[Any]
) -> None:
    torch.manual_seed(0)
    if isinstance(options["kernel_size"], tuple) and kind is not nn.Conv2d:
        pytest.skip("of two dimensions")
    layer, x = kind(2, 4, **options, dtype=F64), torch.randn(3, 2, *OVER[kind], dtype=F64)
    rows = inputs(layer, x)
    with torch.no_grad():
        expected = layer(x).movedim(1, -1).flatten(0, -2)
    torch.testing.assert_close(rows @ as_matrix(layer).t(), expected)
    assert rows.shape[1] == as_matrix(layer).shape[1]


@pytest.mark.parametrize("room", [2**27, 1])
def test_the_covariance_is_a_sum_over_inputs(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankup.methods.shared.spaces.BYTES", room)
    draw = torch.Generator().manual_seed(0)
    image, sequence = torch.rand(5, 2, 6, 6, generator=draw), torch.rand(5, 3, 4, generator=draw)
    for layer, x in ((nn.Conv2d(2, 4, 3, 2, 1), image), (nn.Linear(4, 2), sequence)):
        size = as_matrix(layer).shape[1]
        found, expected = torch.zeros(size, size, dtype=F64), torch.zeros(size, size, dtype=F64)
        add_covariance(found, layer, x)
        if isinstance(layer, nn.Conv2d):
            around = F.pad(x, (1, 1, 1, 1)).double()
            patches = [
                around[n, :, i : i + 3, j : j + 3].flatten()
                for n in range(5)
                for i in range(0, 6, 2)
                for j in range(0, 6, 2)
            ]
        else:
            patches = list(x.flatten(0, 1).double())
        for patch in patches:
            row = torch.cat([patch, torch.ones(1, dtype=F64)])
            expected += torch.outer(row, row)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_triangle_holds_a_symmetric_matrix() -> None:
    for size in (1, 2, 65, 785):
        rows = torch.randn(size, 4, generator=torch.Generator().manual_seed(size))
        matrix = rows @ rows.t()
        triangle = packed((matrix + matrix.t()) / 2)
        assert len(triangle) == size * (size + 1) // 2
        assert torch.equal(unpacked(triangle), (matrix + matrix.t()) / 2)


def test_covariance_is_of_all_tasks() -> None:
    nscl = make()
    expected = {name: torch.zeros(1, dtype=F64) for name in hidden(nscl)}
    for index in range(2):
        nscl.learn(STREAM[index], None, None)
        assert not any(layer._forward_pre_hooks for layer in nscl.layers.values())
        for name, rows in layer_inputs(nscl, STREAM[index]).items():
            expected[name] = expected[name] + rows.t() @ rows
    for name, gram in expected.items():
        torch.testing.assert_close(unpacked(nscl.kept[name]).double(), gram, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize(("kept", "share"), [(20, 1.0), (8, 0.99)])
def test_main_directions_hold_nearly_all_energy(kept: int, share: float) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(50, 19, generator=draw) * torch.logspace(0, -2, 19)
    layer, main, rest = nn.Linear(19, 2), torch.zeros(kept, 20), torch.zeros(())
    for part in torch.split(x, 13):
        add_directions(main, rest, layer, part)
    gram = inputs(layer, x).t() @ inputs(layer, x)
    torch.testing.assert_close(main.square().sum() + rest, gram.trace())
    best = torch.linalg.eigvalsh(gram)[-kept:].sum()
    assert float(main.square().sum()) >= share * float(best) * (1 - 1e-5)
    crossed = main @ main.t()
    torch.testing.assert_close(crossed, crossed.diag().diag(), rtol=0, atol=1e-3)  # orthogonal


def test_inputs_of_a_convolution_are_taken_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = torch.Generator().manual_seed(0)
    x, layer = torch.randn(6, 3, 8, 8, generator=draw), nn.Conv2d(3, 2, 3)
    main, rest, sizes = torch.zeros(28, 28), torch.zeros(()), list[int]()
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: (sizes.append(len(m)), eigh(m))[1])
    add_directions(main, rest, layer, x)
    assert max(sizes) <= 2 * len(main)  # not the 216 inputs that the samples make
    rows = inputs(layer, x)
    torch.testing.assert_close(main.t() @ main, rows.t() @ rows, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("energy", [0.0, 0.01, 0.1, 0.5])
def test_complement_of_main_directions_is_the_null_space(energy: float) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(50, 19, generator=draw) * torch.logspace(0, -2, 19)
    x[:, 15:] = x[:, :4]  # four directions hold nothing
    layer, main, rest = nn.Linear(19, 2), torch.zeros(25, 20), torch.zeros(())
    add_directions(main, rest, layer, x)
    rows = inputs(layer, x).double()
    moves = torch.randn(3, 20, generator=draw, dtype=F64)
    expected = moves @ null_space(rows.t() @ rows, energy)
    found = Without(main_directions(main, rest, energy))(moves)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert float(expected.norm()) > 0.5


def test_energy_that_no_direction_holds_counts_as_free() -> None:
    """Whether the weaker direction is still free depends on how much else is left out."""
    main = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.0]])
    for rest, protected in ((0.0, 1), (2.0, 2)):
        assert int(main_directions(main, torch.tensor(rest), 0.3).norm(dim=1).sum()) == protected


def test_wide_layer_keeps_main_directions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    narrow = make(energy=0.05)
    monkeypatch.setattr("rankup.methods.shared.spaces.WIDE", 64)  # the first layer, not the second
    monkeypatch.setattr("rankup.methods.shared.spaces.MAIN", 65)
    wide = make(energy=0.05)
    for task in STREAM:
        narrow.learn(task, None, None)
        wide.learn(task, None, None)
    first, second = hidden(wide)
    assert wide.kept[first].shape == (65, 65)
    assert wide.kept[second].dim() == 1
    for ours, theirs in zip(matrices(wide), matrices(narrow), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-2)
    more = wide.footprint().parameters - narrow.footprint().parameters
    assert more == 65 * 65 + 1 - 65 * 66 // 2
    wide.save(tmp_path)
    again = type(wide).load(tmp_path, wide.setting)
    assert all(torch.equal(again.kept[name], kept) for name, kept in wide.kept.items())


def test_a_step_is_adams_projected() -> None:
    """Against torch's Adam with each step projected."""
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2)
    ).to(F64)
    plain = copy.deepcopy(body)
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 1, 3, 3, generator=draw), torch.arange(40) % 2
    recipe = Recipe(batch=8, lr=2.0**-6, weight_decay=0.25)
    feed = Feed(rankup.Task("a", 2, x, y, x, y), recipe, torch.device("cpu"), F64)
    projections = []
    for width in (2 * 2 + 1, 12 + 1):
        rows = torch.randn(width // 2, width, generator=draw, dtype=F64)
        projections.append(null_space(rows.t() @ rows, 0.2))
    confined = nn.ModuleList(map(Confined, [body[0], body[3]], map(Within, projections)))
    learner = ConfinedLearner(body, feed, 0, confined)
    drawn = learner.sample_epoch(draw)
    steps = Eager([learner])
    steps.epoch([drawn], [[recipe.lr] * feed.steps_per_epoch], 0)
    steps.adopt()

    layers = [plain[0], plain[3]]
    adam = torch.optim.AdamW(plain.parameters(), recipe.lr, weight_decay=recipe.weight_decay)
    for rows in drawn["rows"]:
        before = [as_matrix(layer).clone() for layer in layers]
        adam.zero_grad()
        F.cross_entropy(plain(x[rows].double()), y[rows]).backward()
        adam.step()
        for layer, old, projection in zip(layers, before, projections, strict=True):
            step = as_matrix(layer) - old
            assert float((step - step @ projection).norm()) > 0.1 * float(step.norm())
            now = old + step @ projection
            with torch.no_grad():
                layer.weight.copy_(now[:, :-1].view_as(layer.weight))
                layer.bias.copy_(now[:, -1])
    for ours, theirs in zip(body.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("energy", [0.01, 0.1])
def test_layers_move_within_the_cut(
    energy: float,
) -> None:
    """‖X ΔWᵀ‖ ≤ σ ‖ΔW‖: X holds a layer's inputs of old tasks, σ is the largest of their singular
    values that were cut. Fine-tuning moves further than that."""
    for name, within in (("nscl", True), ("finetune", False)):
        method = make(name, **({"energy": energy} if name == "nscl" else {}))
        method.learn(STREAM[0], None, None)
        seen = layer_inputs(method, STREAM[0])
        before = {n: as_matrix(layer).clone() for n, layer in hidden(method).items()}
        method.learn(STREAM[1], None, None)
        for layer_name, layer in hidden(method).items():
            x, moved = seen[layer_name], (as_matrix(layer) - before[layer_name]).double()
            cut = brute_cut(x.t() @ x, energy)
            sigma = torch.linalg.svdvals(x).flip(0)[cut - 1]
            assert float(moved.norm()) > 0.3  # it has learned something
            assert (float((x @ moved.t()).norm()) <= 1.001 * float(sigma * moved.norm())) == within


def logits_moved(method: Method, task: rankup.Task, later: rankup.Task) -> float:
    """How far the answers for a task move while another one is learned."""
    method.learn(task, None, None)
    ((x, _),) = Feed(task, RECIPE, torch.device("cpu")).train(2048)
    before = method.predict(x, 0)
    method.learn(later, None, None)
    return float((method.predict(x, 0) - before).detach().norm())


def test_where_old_inputs_leave_room_old_answers_stay() -> None:
    """Twenty inputs span a proper subspace of what every layer reads."""
    first, second = blobs(0, 64, samples=20), blobs(1, 64)
    recipe = Recipe(epochs=20, batch=10)
    free = logits_moved(make("finetune", recipe=recipe), first, second)
    nscl = make(recipe=recipe, energy=0.0)
    assert logits_moved(nscl, first, second) < 1e-5 * free
    again = make(recipe=recipe, energy=0.0)
    again.learn(first, None, None)
    room = [float(layer.free.projection.trace()) for layer in again.begin(second).confined]
    assert room == pytest.approx([64 + 1 - 20, 32 + 1 - 20], abs=1e-3)
    for before, after in zip(matrices(again), matrices(nscl), strict=True):
        assert float((after - before).norm()) > 0.3  # and both layers used it


def test_first_task_learns_as_finetune() -> None:
    nscl, plain = make(), make("finetune")
    for task in STREAM.tasks[:2]:
        nscl.learn(task, None, None)
        plain.learn(task, None, None)
        same = [torch.equal(*pair) for pair in zip(matrices(nscl), matrices(plain), strict=True)]
        assert all(same) if nscl.learned == 1 else not any(same)


def test_products_are_exact_where_steps_are_not() -> None:
    nscl = make(recipe=replace(RECIPE, precision="tf32"))
    nscl.learn(STREAM[0], None, None)
    learner, seen = nscl.begin(STREAM[1]), []
    (confined, *_) = learner.confined
    settle = confined.after_step
    confined.after_step = lambda: (seen.append(torch.get_float32_matmul_precision()), settle())
    draws = learner.sample_epoch(torch.Generator().manual_seed(0))
    two = {name: entries[:2] for name, entries in draws.items()}
    Eager([learner]).epoch([two], [[1e-3, 1e-3]], 0)
    assert seen == ["highest", "highest"]


def test_norms_are_each_tasks_own() -> None:
    net = rankup.models.resnet18(width=4, image_size=8, channels=1)
    nscl = make(net=net)
    whole = STREAM[0]
    nscl.learn(replace(whole, train_x=whole.train_x[:400], train_y=whole.train_y[:400]), None, None)
    learner = nscl.begin(STREAM[1])
    shared = {id(p) for layer in nscl.layers.values() for p in layer.parameters()}
    others = [name for name, p in learner.learned().items() if id(p) not in shared]
    assert others
    assert all(".new_" in name for name in others)
    with torch.no_grad():  # whatever becomes of the new task's norms, old answers stay
        x = next(learner.feed.test())[0]
        before = nscl.predict(x, 0)
        for name, parameter in learner.named_parameters():
            if name in others:
                parameter.add_(1)
        assert torch.equal(nscl.predict(x, 0), before)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.a(x)) * self.scale)


def test_uncovered_parameters_are_refused() -> None:
    setting = replace(make().setting, module=Scaled(), grow_options=GROWTH)
    with pytest.raises(rankup.RankupError, match="without groups, .* also has scale"):
        NSCL(setting)
