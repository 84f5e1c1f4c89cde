"""Tasks that stand on their own: learned anywhere, removed, joined, and the same bits always."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rankup
from helpers.zoo import inputs, module
from rankup.layers import FactoredLayer

KINDS = ["mlp", "resnet18", "transformer"]
X = {kind: inputs(kind, seed=5) for kind in KINDS}


def grown(kind: str, base: str = "keep", **options: object) -> rankup.IncrementalNet:
    torch.manual_seed(0)
    given = {"rank": rankup.Rank(2, 1, seeded=3), "base": base, **options}
    return rankup.grow(module(kind), **given)  # type: ignore[arg-type]


def learn(net: rankup.IncrementalNet, name: str, kind: str = "mlp", uses: object = "own") -> None:
    """Learn a task whose data follow from its name, and which has odd numbers of classes, so that
    rows of tables are not aligned by chance."""
    classes = 3 + len(name)
    net.begin_task(name, classes, uses=uses)  # type: ignore[arg-type]
    net.train()
    x = X[kind] + sum(map(ord, name)) / 1000
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(net(x, name), torch.arange(len(x)) % classes).backward()
        optimiser.step()
    net.commit_task(calibrate=[x])
    net.eval()


def answers(net: rankup.IncrementalNet, kind: str = "mlp") -> dict[str, Tensor]:
    with torch.no_grad():
        return {name: net(X[kind], name) for name in net.tasks}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name in one.keys() & other.keys():
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_task_learned_alone_and_joined_equals_one_learned_in_place(kind: str) -> None:
    in_place, alone = grown(kind), grown(kind)
    for name in ("a", "bb", "ccc"):
        learn(in_place, name, kind)
    learn(alone, "ccc", kind, uses="all")  # there is nothing that it could use
    joined = grown(kind)
    for name in ("bb", "a"):
        learn(joined, name, kind)
    joined.join(alone)
    assert joined.tasks == ["bb", "a", "ccc"]
    before = answers(in_place, kind)
    assert_same(before, answers(joined, kind))
    assert_same(before, answers(alone, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_batches_agree_with_tasks_that_select_from_some(kind: str) -> None:
    net = grown(kind)
    learn(net, "a", kind)
    learn(net, "bb", kind)
    learn(net, "ccc", kind, uses=["a"])
    learn(net, "dddd", kind, uses=["ccc", "bb"])
    learn(net, "e", kind, uses="all")
    ids = torch.arange(len(X[kind])) % 5
    with torch.no_grad():
        mixed = net(X[kind], ids)
    for name, logits in answers(net, kind).items():
        rows = ids == net.tasks.index(name)
        torch.testing.assert_close(mixed[rows][:, : logits.shape[1]], logits[rows])


def test_selectors_reach_just_the_tasks_that_are_used() -> None:
    net = grown("mlp")
    for name, uses in {"a": "all", "bb": "own", "ccc": ["bb"], "dd": [], "e": "all"}.items():
        learn(net, name, uses=uses)
    layer = next(layer for layer in net.layers if isinstance(layer, FactoredLayer))
    assert layer.spec.rank.seeded == 3
    used = [(layer.S[t, 3:] != 0).int().tolist() for t in range(5)]
    # Tasks that select from no other add two factors, others one.
    assert used[0] == [1, 1, 0, 0, 0, 0, 0, 0]
    assert used[1] == [0, 0, 1, 1, 0, 0, 0, 0]
    assert used[2] == [0, 0, 1, 1, 1, 0, 0, 0]
    assert used[3] == [0, 0, 0, 0, 0, 1, 1, 0]
    assert [len(layer.added(t)["selector"]) for t in range(5)] == [5, 5, 6, 5, 11]


def test_removing_is_refused_for_what_others_need() -> None:
    net = grown("mlp")
    learn(net, "a")
    learn(net, "bb", uses=["a"])
    with pytest.raises(rankup.RankupError, match="task 'a' cannot be removed: 'bb' selects from"):
        net.remove_task("a")
    learn(net, "ccc", uses="all")
    with pytest.raises(rankup.RankupError, match="'bb', and 1 more, selects from its factors"):
        net.remove_task("a")
    net.begin_task("open", 2)
    with pytest.raises(rankup.RankupError, match="'open' is being learned"):
        net.remove_task("ccc")


def test_first_task_that_trained_shared_parts_stays() -> None:
    net = grown("transformer", base="new", exclude="mlp.*")
    learn(net, "a", "transformer")
    learn(net, "bb", "transformer")
    with pytest.raises(rankup.RankupError, match="'a' cannot be removed: 'mlp.0.weight' was"):
        net.remove_task("a")
    other = grown("transformer", base="new", exclude="mlp.*")
    learn(other, "ccc", "transformer")
    with pytest.raises(rankup.RankupError, match="cannot be joined: 'mlp.0.weight' was trained"):
        net.join(other)


def test_seeded_tasks_can_all_be_removed() -> None:
    net = grown("mlp", base="new", rank=rankup.Rank(0, 0, seeded=20))
    for name in ("a", "bb", "ccc"):
        learn(net, name, uses="all")
    before = answers(net)
    net.remove_task("a")
    assert net.tasks == ["bb", "ccc"]
    assert_same(before, answers(net))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seed": 1}, "options differ"),
        ({"rank": rankup.Rank(1, 1)}, "options differ"),
        ({"base": "new"}, "options differ"),
    ],
)
def test_only_networks_grown_alike_join(change: dict[str, object], why: str) -> None:
    net, other = grown("mlp"), grown("mlp", **change)
    with pytest.raises(rankup.RankupError, match=why):
        net.join(other)


def test_other_base_and_other_task_of_the_same_name_are_refused() -> None:
    net, other = grown("mlp"), grown("mlp")
    learn(net, "a")
    learn(other, "a", uses=[])
    net.join(other)  # the same task
    assert net.tasks == ["a"]
    different = grown("mlp")
    different.begin_task("a", 4)
    different.commit_task()
    with pytest.raises(rankup.RankupError, match="different tasks of the name 'a'"):
        net.join(different)
    torch.manual_seed(1)
    moved = rankup.grow(module("mlp"), rankup.Rank(2, 1, seeded=3), base="keep")
    with torch.no_grad():
        next(layer for layer in moved.layers if layer.base()).base()["weight"].add_(1)
    with pytest.raises(rankup.RankupError, match="the kept weights of '.*' differ"):
        net.join(moved)


def test_uses_is_checked() -> None:
    net = grown("mlp")
    learn(net, "a")
    for uses, why in (
        ("none", "can use 'all' tasks, only its 'own' factors, or a list"),
        (3, "can use 'all' tasks"),
        (["zebra"], "there is no task 'zebra'"),
        (["a", "a"], "cannot use a task twice"),
    ):
        with pytest.raises(rankup.RankupError, match=why):
            net.begin_task("b", 2, uses=uses)  # type: ignore[arg-type]
    assert net.learning is None


def test_fit_learns_the_same_bits_in_any_order() -> None:
    stream = rankup.data.make_stream("s-digits")[:3]
    recipe = rankup.Recipe(epochs=5)
    found = []
    for order in ((0, 1, 2), (2, 0, 1)):
        net = rankup.grow(rankup.models.mlp(64, hidden=[16]), rankup.Rank(2, 1))
        for index in order:
            rankup.fit(net, stream[index], recipe, uses="own")
        x = rankup.data.to_float(stream[0].test_x[:20])
        found.append({name: net.eval()(x, name) for name in net.tasks})
    assert_same(*found)


@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_learning_removing_joining_and_saving_changes_bits(
    seed: int, tmp_path: Path
) -> None:
    assert_bits_stay(random.Random(seed), 14, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 600))
def test_long_random_lives(seed: int, tmp_path: Path) -> None:
    assert_bits_stay(random.Random(seed), 20, tmp_path)


def assert_bits_stay(draw: random.Random, steps: int, folder: Path) -> None:
    """Live a random life with two networks, and compare every task that there ever was."""
    nets, seen = [grown("mlp"), grown("mlp")], dict[str, Tensor]()
    for step in range(steps):
        number = draw.randrange(2)
        net = nets[number]
        match draw.choice(["learn", "learn", "remove", "join", "save", "load some"]):
            case "learn":
                some = draw.sample(net.tasks, draw.randint(0, len(net.tasks)))
                name = f"{step}{'x' * draw.randint(0, 4)}"
                learn(net, name, uses=draw.choice(["all", "own", some]))
            case "remove" if net.tasks:
                name = draw.choice(net.tasks)
                try:
                    net.remove_task(name)
                except rankup.RankupError:
                    assert any(name in net.describe(task).uses for task in net.tasks)
            case "join":
                net.join(nets[1 - number])
            case "save" if saved(net, folder / f"{number}"):
                assert rankup.verify(folder / f"{number}", module("mlp"))
                nets[number] = rankup.load(folder / f"{number}", module("mlp"))
                assert {*net.tasks} <= {*nets[number].tasks}
            case "load some" if net.tasks and saved(net, folder / f"{number}"):
                name = draw.choice(net.tasks)
                nets[number] = rankup.load(folder / f"{number}", module("mlp"), tasks=[name])
        for one in nets:
            now = answers(one)
            for name, logits in now.items():
                assert torch.equal(seen.setdefault(name, logits), logits), (step, name)
            if len(now) > 1:
                ids = torch.arange(len(X["mlp"])) % len(now)
                with torch.no_grad():
                    mixed = one(X["mlp"], ids)
                for row, task in enumerate(ids.tolist()):
                    alone = now[one.tasks[task]][row]
                    torch.testing.assert_close(mixed[row, : len(alone)], alone)


def saved(net: rankup.IncrementalNet, folder: Path) -> bool:
    """Save a network, unless it has removed a task that one in the folder, which it has not loaded,
    selects from."""
    try:
        rankup.save(net, folder)
    except rankup.StoreError as error:
        if "which was saved there, selects from its factors" not in str(error):
            raise
        return False
    return True
