"""Tasks learned at once end as each does alone, and nothing of one reaches another."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankup
from rankup import Rank, RankupError, Recipe

QUICK = Recipe(epochs=8, batch=16)


def task(name: str, samples: int = 64, classes: int = 3, shape: tuple[int, ...] = (12,)) -> Any:
    """Samples around a centre for each class, drawn by the task's name."""
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    centres = torch.randn(classes, *shape, generator=draw)
    y = torch.arange(samples + 30) % classes
    x = (centres[y] + 0.3 * torch.randn(len(y), *shape, generator=draw)).double()
    return rankup.Task(name, classes, x[:samples], y[:samples], x[samples:], y[samples:])


def unequal(*shape: int) -> list[Any]:
    """Tasks that differ in samples and classes; the last has less than a batch."""
    return [
        task("a", 64, 3, shape),
        task("b", 40, 4, shape),
        task("c", 12, 2, shape),
        task("d", 64, 3, shape),
    ]


def network(module: nn.Module, **options: Any) -> rankup.IncrementalNet:
    options = {"rank": Rank(2, 1), "base": "keep", **options}
    return rankup.grow(module.double(), **options)


def mlp(**options: Any) -> rankup.IncrementalNet:
    torch.manual_seed(0)
    return network(rankup.models.mlp(12, hidden=[16, 16]), **options)


class Attention(nn.Module):
    """Tokens that look at each other, between norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed, self.last = nn.LayerNorm(8), nn.Linear(8, 24), nn.RMSNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(self.norm(x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head(self.last(x).mean(1))


class OwnNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (12,), self.weight, self.bias, self.eps)


def modules() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    torch.manual_seed(0)
    convolutions = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    steps = nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5))
    own = nn.Sequential(OwnNorm(12), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))
    return {
        "mlp": (rankup.models.mlp(12, hidden=[16, 16]), (12,)),
        "attention": (Attention(), (6, 8)),
        "convolutions and batch norm": (convolutions, (3, 8, 8)),
        "convolution of steps": (steps, (3, 8)),
        "norm with a forward of its own": (own, (12,)),
    }


def values(net: rankup.IncrementalNet, name: str) -> dict[str, Tensor]:
    """All that a task added."""
    index = net.tasks.index(name)
    return {
        f"{layer.spec.name}.{key}": tensor
        for layer in net.layers
        for key, tensor in layer.added(index).items()
    }


def assert_alike(one: rankup.IncrementalNet, other: rankup.IncrementalNet, name: str) -> None:
    first, second = values(one, name), values(other, name)
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        torch.testing.assert_close(second[key], tensor, rtol=0, atol=1e-9, msg=f"{name} {key}")


def after_another(net: rankup.IncrementalNet, tasks: list[Any], recipe: Recipe, **kw: Any) -> Any:
    for each in tasks:
        rankup.fit(net, each, recipe, **{"uses": "own", **kw})
    return net


@pytest.mark.parametrize("kind", list(modules()))
def test_ends_as_alone(kind: str) -> None:
    module, shape = modules()[kind]
    tasks = unequal(*shape)
    recipe = Recipe(epochs=20, batch=16, lr=2e-2)
    alone, both = (network(copy.deepcopy(module)) for _ in range(2))
    after_another(alone, tasks, recipe)
    assert rankup.fit_together(both, tasks, recipe) == {}
    assert both.tasks == alone.tasks
    for each in tasks:
        assert_alike(alone, both, each.name)


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "mse"},
        {"optimiser": "sgd", "lr": 0.5, "weight_decay": 0.01},
        {"schedule": "constant", "weight_decay": 0.1, "first_factors": 2.0, "first_lr": 5e-3},
    ],
    ids=["mse", "sgd", "constant"],
)
def test_ends_as_alone_by_any_recipe(options: dict[str, Any]) -> None:
    recipe = Recipe(**{"epochs": 12, "batch": 16, **options})
    alone = after_another(mlp(), unequal(12)[:2], recipe)
    both = mlp()
    assert rankup.fit_together(both, unequal(12)[:2], recipe) == {}
    for name in "ab":
        assert_alike(alone, both, name)


def test_ends_as_alone_with_augmentation() -> None:
    module, shape = modules()["convolutions and batch norm"]
    # A mirrored centre is another class's, so these are the same from both sides.
    tasks = [task(name, 64, 2, (3, 1, 1)) for name in "ab"]
    for each in tasks:
        for key in ("train_x", "test_x"):
            object.__setattr__(each, key, getattr(each, key).expand(-1, *shape).contiguous())
    recipe = Recipe(epochs=8, batch=16, flip=True, crop=2)
    alone, both = (network(copy.deepcopy(module)) for _ in range(2))
    after_another(alone, tasks, recipe)
    assert rankup.fit_together(both, tasks, recipe) == {}
    assert_alike(alone, both, "b")


def test_builds_on_tasks_that_are_known() -> None:
    alone, both = (mlp(rank=Rank(2, 1, seeded=4)) for _ in range(2))
    for net in (alone, both):
        rankup.fit(net, task("first"), QUICK)
        rankup.fit(net, task("second"), QUICK)
    after_another(alone, unequal(12)[:2], QUICK, uses=["second"])
    before = {name: both(task("first").test_x, name) for name in both.tasks}
    assert rankup.fit_together(both, unequal(12)[:2], QUICK, uses=["second"]) == {}
    assert_alike(alone, both, "a")
    assert_alike(alone, both, "b")
    for name, answer in before.items():
        assert torch.equal(both(task("first").test_x, name), answer)


def test_each_default_recipe_is_its_tasks_own() -> None:
    few, many = task("few", 24, 2), task("many", 10_000, 3)
    epochs: dict[str, int] = {}
    rankup.fit_together(mlp(), [few, many], on_epoch=lambda n, e: epochs.update({n: e.epochs}))
    assert epochs == {"few": 60, "many": 8}


def test_nan_in_one_task_reaches_no_other() -> None:
    for kind, (module, shape) in modules().items():
        tasks = [task(name, 48, 3, shape) for name in "abc"]
        clean, broken = (network(copy.deepcopy(module)) for _ in range(2))
        assert rankup.fit_together(clean, tasks, QUICK) == {}
        tasks[1].train_x[20] = float("nan")
        failed = rankup.fit_together(broken, tasks, QUICK)
        assert list(failed) == ["b"]
        assert "diverged" in str(failed["b"])
        assert broken.tasks == ["a", "c"]
        assert broken.learning is None
        for name in "ac":
            for key, tensor in values(clean, name).items():
                assert torch.equal(values(broken, name)[key], tensor), (kind, name, key)


def test_task_that_cannot_be_learned_is_left_out() -> None:
    lost = task("lost")
    lost.train_y[:] = torch.randint(3, (64,), generator=torch.Generator().manual_seed(0))
    net = mlp()
    failed = rankup.fit_together(net, [task("a"), lost, task("b")], Recipe(epochs=1, batch=16))
    assert set(failed) <= {"a", "lost", "b"}
    assert "lost" in failed
    assert "not three standard errors above guessing" in str(failed["lost"])
    assert "lost" not in net.tasks
    assert net.learning is None


@pytest.mark.parametrize("at", [("a", 1), ("b", 5)])
def test_interruption_leaves_network_as_it_was(at: tuple[str, int]) -> None:
    net = mlp()
    rankup.fit(net, task("first"), QUICK)
    before, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]

    def stop(name: str, epoch: rankup.Epoch) -> None:
        if (name, epoch.number) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rankup.fit_together(net, unequal(12), QUICK, on_epoch=stop)
    assert net.tasks == ["first"]
    assert net.learning is None
    assert not list(net.parameters())
    assert [m.training for m in net.modules()] == modes
    after = net.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert rankup.fit_together(net, unequal(12), QUICK) == {}


def test_interrupted_commit_keeps_what_was_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    def check(pupil: Any, feed: Any) -> None:
        checked.append(feed.task.name)
        if len(checked) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("rankup.training.together.why_not_learned", check)
    net, whole = mlp(), mlp()
    rankup.fit_together(whole, unequal(12)[:2], QUICK)
    checked.clear()
    with pytest.raises(KeyboardInterrupt):
        rankup.fit_together(net, unequal(12), QUICK)
    assert net.tasks == ["a", "b"]
    assert net.learning is None
    assert_alike(whole, net, "b")


def test_selects_from_seeded_factors_alone() -> None:
    alone, both = (mlp(rank=Rank(0, 0, seeded=32)) for _ in range(2))
    recipe = Recipe(epochs=10, batch=16, lr=2e-2)
    after_another(alone, unequal(12)[:2], recipe)
    assert rankup.fit_together(both, unequal(12)[:2], recipe) == {}
    assert_alike(alone, both, "b")


def test_progress_is_each_tasks_own() -> None:
    told: dict[str, list[tuple[int, int]]] = {}
    accuracies: dict[str, float] = {}
    kept: list[rankup.Epoch] = []

    def tell(name: str, epoch: rankup.Epoch) -> None:
        told.setdefault(name, []).append((epoch.number, epoch.epochs))
        accuracies[name] = epoch.accuracy()
        kept.append(epoch)

    net = mlp()
    rankup.fit_together(net, unequal(12), QUICK, on_epoch=tell)
    assert told == {each.name: [(n, 8) for n in range(1, 9)] for each in unequal(12)}
    for each in unequal(12):
        right = (net(each.train_x, each.name).argmax(1) == each.train_y).double().mean()
        assert accuracies[each.name] == pytest.approx(float(right))
    with pytest.raises(RankupError, match="only while on_epoch"):
        kept[0].accuracy()


def test_saved_removed_and_joined_as_any_task(tmp_path: Path) -> None:
    net, other = mlp(), mlp()
    rankup.fit_together(net, unequal(12), QUICK)
    rankup.save(net, tmp_path / "net")
    assert not rankup.verify(tmp_path / "net").problems
    loaded = rankup.load(tmp_path / "net", module=rankup.models.mlp(12, hidden=[16, 16]).double())
    x = task("a").test_x
    answers = {name: net(x, name) for name in net.tasks}
    assert all(torch.equal(loaded(x, name), answer) for name, answer in answers.items())
    loaded.remove_task("b")
    rankup.fit_together(other, [task("e"), task("f")], QUICK)
    loaded.join(other)
    assert loaded.tasks == ["a", "c", "d", "e", "f"]
    for name in ("a", "c", "d"):
        assert torch.equal(loaded(x, name), answers[name])


def test_clipping_is_each_tasks_own() -> None:
    long, short = task("long"), task("b")
    long.train_x.mul_(100)  # its gradients are by far the longest
    recipe = Recipe(epochs=10, batch=16, optimiser="sgd", lr=0.3)
    alone, both, free = mlp(), mlp(), mlp()
    rankup.fit_together(alone, [short], recipe, clip=0.5)
    rankup.fit_together(both, [long, short], recipe, clip=0.5)
    rankup.fit_together(free, [short], recipe)
    assert_alike(alone, both, "b")
    with pytest.raises(AssertionError):
        assert_alike(alone, free, "b")


def test_half_precision_learns_as_well() -> None:
    found = []
    for half in (False, True):
        torch.manual_seed(0)
        net = rankup.grow(rankup.models.mlp(12, hidden=[16, 16]), Rank(2, 1), base="keep")
        tasks = [task("a"), task("b")]
        for each in tasks:
            for key in ("train_x", "test_x"):
                object.__setattr__(each, key, getattr(each, key).float())
        assert rankup.fit_together(net, tasks, Recipe(epochs=40, batch=16), half=half) == {}
        found.append([rankup.accuracy(net, each) for each in tasks])
    assert found[1] == pytest.approx(found[0], abs=0.05)
    assert min(found[0]) > 0.8


class FirstDimension(nn.Module):
    """Takes steps before samples."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mixed(x.transpose(0, 1)).relu().mean(0))


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0][:, -1])


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (mlp, {"uses": "all"}, "cannot build on each other"),
        (mlp, {"tasks": []}, "takes at least one task, got none"),
        (mlp, {"tasks": task("a")}, "takes several tasks, got a Task"),
        (mlp, {"tasks": ["a"]}, "takes a rankup.data.Task, got str"),
        (mlp, {"tasks": [task("a"), task("a")]}, "names of their own, got 'a' twice"),
        (mlp, {"clip": 0.0}, "clip must be a positive number, got 0.0"),
        (lambda: mlp(base="new"), {}, "learn it with fit, or grow a module with base='keep'"),
        (lambda: network(Gates()), {"tasks": unequal(6, 8)[:1]}, "one task at a time"),
        (
            lambda: network(FirstDimension()),
            {"tasks": [task("a", shape=(6, 8)), task("b", shape=(6, 8))]},
            "cannot run samples of several tasks in one pass",
        ),
    ],
    ids=["all", "none", "one", "no task", "names", "clip", "new", "own forward", "steps first"],
)
def test_refusals_say_what_to_do(make: Any, options: dict[str, Any], message: str) -> None:
    net = make()
    options = {"tasks": unequal(12), **options}
    with pytest.raises(RankupError, match=message):
        rankup.fit_together(net, options.pop("tasks"), QUICK, **options)
    assert net.tasks == []
    assert net.learning is None
