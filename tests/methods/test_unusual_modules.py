"""Methods with modules that hold more than plain layers' weights: frozen or tied ones, buffers that
change, other dtypes and inputs."""

import math
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.rivals import answer, right, toys
from rankup.data.tasks import Task
from rankup.growing.options import GrowOptions
from rankup.methods import METHODS, method_class, method_options
from rankup.methods.base import Method, Setting
from rankup.rank import Rank
from rankup.training.loop import peak_rate
from rankup.training.recipe import Recipe

# The others refuse modules in which tasks would share what is no layer.
WHOLE = [name for name in METHODS if name not in ("supsup", "ibpwf", "vera", "randlora")]
RECIPE = Recipe(epochs=10, batch=16)


def made(name: str, module: nn.Module, tasks: list[Task], *exclude: str, **recipe: Any) -> Setting:
    chosen = replace(RECIPE, **{**METHODS[name].recipe, **recipe})
    grow_options = GrowOptions(Rank(4, 1), exclude=exclude)
    return Setting(module, grow_options, chosen, 0, tasks, method_options(name, {}))


def method(setting: Setting, name: str) -> Method:
    return method_class(name)(setting)


class Chain(nn.Module):
    """What is first, and two layers."""

    def __init__(self, first: nn.Module, inputs: int = 12) -> None:
        super().__init__()
        self.first, self.a, self.head = first, nn.Linear(inputs, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(torch.relu(self.a(self.first(x))))
        return answer


class Centre(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.b(torch.relu(self.a(x))))


class OverLast(nn.Linear):
    """Over the last dimension, whose size it needs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(1)


class MeanEmbedding(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


@pytest.mark.parametrize("name", ["rank", "hat", "packnet", "supsup", "wsn", "ibpwf", "vera"])
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(
    "first", [Centre, lambda: nn.BatchNorm1d(12, affine=False)], ids=["own", "norm"]
)
def test_never_forgetting_holds_self_updating_buffers(
    first: Callable[[], nn.Module], loaded: bool, name: str, tmp_path: Path
) -> None:
    tasks = toys(12)
    setting = made(name, Chain(first()), tasks, "first")
    learning = method(setting, name)
    learning.learn(tasks[0], None, None)
    before = answer(learning, tasks[0], 0)
    if loaded:
        learning.save(tmp_path)
        learning = method_class(name).load(tmp_path, setting)
    learning.learn(tasks[1], None, None)
    assert torch.equal(answer(learning, tasks[0], 0), before)


@pytest.mark.parametrize("name", WHOLE)
def test_frozen_parameters_stay_as_given(name: str) -> None:
    tasks, module = toys(12), Chain(nn.Linear(12, 12))
    module.first.requires_grad_(False)
    learning = method(made(name, module, tasks, "first"), name)
    learning.learn(tasks[0], None, None)
    assert right(learning, tasks[0], 0) > 0.9
    kept: Any = getattr(learning, "net", None) or getattr(learning, "networks", [learning])[0]
    weight = kept.body.first.weight
    assert torch.equal(weight, module.first.weight)


@pytest.mark.parametrize("name", list(METHODS))
def test_modules_in_double_precision_are_learned(name: str) -> None:
    tasks = toys(12)
    learning = method(made(name, rankup.models.mlp(12, [32, 32]).double(), tasks), name)
    learning.learn(tasks[0], None, None)
    assert learning.predict(tasks[0].test_x.double(), 0).dtype == torch.float64


def test_double_precision_counts_twice() -> None:
    tasks = toys(12)
    stored = []
    for module in (rankup.models.mlp(12, [16]), rankup.models.mlp(12, [16]).double()):
        learning = method(made("rank", module, tasks), "rank")
        learning.learn(tasks[0], None, None)
        stored.append(learning.footprint().parameters)
    assert stored[1] == 2 * stored[0]


@pytest.mark.parametrize("pixels", ["unit", "raw", "centred"])
@pytest.mark.parametrize("name", ["finetune", "icarl", "er-ring", "der", "hat"])
def test_indices_are_left_alone(name: str, pixels: str) -> None:
    draw, y = torch.Generator().manual_seed(0), torch.arange(96) % 3
    x = 5 * y[:, None] + torch.randint(5, (96, 6), generator=draw)
    tasks = [Task(f"{index}", 3, x, y, x, y) for index in range(2)]
    module = Chain(MeanEmbedding(20, 8), inputs=8)
    learning = method(made(name, module, tasks, "first", pixels=pixels), name)
    learning.learn(tasks[0], None, None)
    assert right(learning, tasks[0], 0) > 0.9


@pytest.mark.parametrize(("name", "times"), [("finetune", 1), ("ewc", 2)])
def test_tied_weights_are_stored_once(name: str, times: int) -> None:
    tasks, module = toys(12), Chain(Tied())
    learning = method(made(name, module, tasks, "first"), name)
    for task in tasks[:2]:
        learning.learn(task, None, None)
    head = 32 * 3 + 3
    shared = sum(p.numel() for p in module.parameters()) - head
    assert learning.footprint().parameters == times * shared + 2 * head


def test_cumulative_norms_go_on_after_loading(tmp_path: Path) -> None:
    tasks = toys(12)
    setting = made("finetune", Chain(nn.BatchNorm1d(12, momentum=None)), tasks)
    learning = method(setting, "finetune")
    learning.learn(tasks[0], None, None)
    learning.save(tmp_path)
    loaded = method_class("finetune").load(tmp_path, setting)
    for each in (learning, loaded):
        each.learn(tasks[1], None, None)
    assert torch.equal(answer(learning, tasks[1], 1), answer(loaded, tasks[1], 1))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "where": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "masked": lambda x: x.masked_fill(~(x > 0), 0.0),
    "no nan": lambda x: torch.relu(x).nan_to_num(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_hat_never_forgets_with_activations_that_compare(name: str) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(12, 48), nn.Linear(48, 48), nn.Linear(48, 3)

        def forward(self, x: Tensor) -> Tensor:
            act = ACTIVATIONS[name]
            answer: Tensor = self.head(act(self.b(act(self.a(x)))))
            return answer

    tasks = toys(12)
    learning = method(made("hat", Own(), tasks), "hat")
    learning.learn(tasks[0], None, None)
    before = answer(learning, tasks[0], 0)
    # Little is left to learn with if everything that may matter is frozen.
    with suppress(rankup.TaskFailed):
        learning.learn(tasks[1], None, None)
    assert torch.equal(answer(learning, tasks[0], 0), before)


def test_every_independent_network_learns_a_first_task() -> None:
    tasks = toys(12)
    recipe: dict[str, Any] = {"first_lr": 5e-3, "first_factors": 3.0}
    learning = method(made("parallel", rankup.models.mlp(12, [16]), tasks, **recipe), "parallel")
    for task in tasks[:2]:
        learning.begin(task)
        assert peak_rate(learning) == 5e-3
        learning.abandon()
        learning.learn(task, None, None)


def convolving() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            first=nn.Conv2d(1, 4, 3),
            act=nn.ReLU(),
            next=nn.Conv2d(4, 8, 3),
            flat=nn.Flatten(),
            head=nn.Linear(32, 3),
        )
    )


def test_frozen_weights_are_off_the_manifold() -> None:
    tasks, module = toys(1, 6, 6), convolving()
    module.first.requires_grad_(False)
    learning = method(made("orthog", module, tasks, "first"), "orthog")
    learning.learn(tasks[0], None, None)
    assert torch.equal(learning.body.first.weight, module.first.weight)  # type: ignore[attr-defined]
    assert learning.orthonormal == ["next.weight"]  # type: ignore[attr-defined]


def test_a_tied_weight_is_on_the_stiefel_manifold_once() -> None:
    tasks = toys(12)
    options = method_options("orthog", {"stiefel": "yes"})
    setting = replace(made("orthog", Chain(Tied()), tasks, "first", epochs=40), options=options)
    learning: Any = method(setting, "orthog")
    learning.learn(tasks[0], None, None)
    assert learning.orthonormal == ["first.a.weight", "a.weight"]
    weight = learning.body.first.b.weight
    torch.testing.assert_close(weight @ weight.t(), torch.eye(12), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["nscl", "gpm"])
def test_layers_that_share_a_weight_are_refused(name: str) -> None:
    message = f"{name} moves .* where its layer's inputs leave room, but first.a and first.b share"
    with pytest.raises(rankup.RankupError, match=message):
        method(made(name, Chain(Tied()), toys(12), "first"), name)


def test_layout_trials_are_no_inputs_to_protect() -> None:
    tasks, module, kept = toys(1, 6, 6), convolving(), []
    for answers_before in (False, True):
        learning = method(made("nscl", module, tasks), "nscl")
        learning.begin(tasks[0])
        if answers_before:
            answer(learning, tasks[0], 0)
        learning.end()
        kept.append(learning.kept)  # type: ignore[attr-defined]
    for name, covariance in kept[0].items():
        torch.testing.assert_close(covariance, kept[1][name], rtol=1e-5, atol=1e-5)


def test_packnet_leaves_no_layer_without_weights() -> None:
    tasks = toys(12, count=6)
    small = nn.Sequential(
        nn.Unflatten(1, (1, 12)), nn.Conv1d(1, 1, 3, padding=1, bias=False), nn.Flatten()
    )
    learning: Any = method(made("packnet", Chain(small), tasks), "packnet")
    for task in tasks:
        learning.begin(task)
        learning._learner.prune()
        learning.end()
        assert learning.body.first[1].weight.any()
    assert learning.owners("first.1.weight").flatten().sort().values.tolist() == [1, 2, 3]


def test_icarls_old_network_drops_nothing_out() -> None:
    tasks = toys(12)
    learning: Any = method(made("icarl", Chain(nn.Dropout(0.5)), tasks), "icarl")
    learning.learn(tasks[0], None, None)
    learner = learning.begin(tasks[1])
    one, other = (learner._answers(learner.old, tasks[1].train_x) for _ in range(2))
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["agem", "er-ring", "icarl", "der"])
@pytest.mark.parametrize("shape", [(48,), (4, 4, 3)], ids=["flat", "channels last"])
def test_a_memory_keeps_the_shape_that_transforms_make(name: str, shape: tuple[int, ...]) -> None:
    def transform(x: Tensor) -> Tensor:
        return x.flatten(1) if len(shape) == 1 else x.movedim(1, -1)

    tasks = [replace(task, transform=transform) for task in toys(3, 4, 4)]
    module = Chain(OverLast(shape[-1], 4), inputs=4 * math.prod(shape[:-1]))
    learning: Any = method(made(name, module, tasks, "first"), name)
    for task in tasks[:2]:
        learning.learn(task, None, None)
    learner = learning.begin(tasks[2])
    assert learner.memory_x.shape[1:] == shape
    kept = {tuple(x.flatten().tolist()) for x in learner.memory_x[: learner.held]}
    given = {tuple(transform(x[None]).flatten().tolist()) for t in tasks[:2] for x in t.train_x}
    assert kept <= given


def test_memory_refuses_transforms_of_other_shapes() -> None:
    one, other, _ = toys(12)
    tasks = [one, replace(other, transform=lambda x: x.view(-1, 3, 4))]
    message = r"the same shape, got torch.Size\(\[12\]\) in '0' and torch.Size\(\[3, 4\]\) in '1'"
    with pytest.raises(rankup.RankupError, match=message):
        method(made("er-ring", Chain(nn.Flatten()), tasks), "er-ring")
