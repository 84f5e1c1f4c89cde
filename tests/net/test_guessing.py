"""Guessing tasks: what routers keep, that it is exact, and that told answers stay as they were."""

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rankup
from rankup.data import make_stream, to_float
from rankup.net.routers import routing as routing_file
from rankup.net.routers.analytic import likelihoods, solve
from rankup.net.routers.base import Examples, RoutedBatch
from rankup.net.routers.features import base_features
from rankup.net.routers.routing import Routing
from rankup.net.routers.sums import Sums

ALL = "energy, mahalanobis=0.1, means, analytic, features=48"
APART = "analytic, features=48, apart"
RECIPE = rankup.Recipe(epochs=6, batch=16, lr=0.03)
STREAM = [*make_stream("s-digits")]
X = torch.cat([to_float(task.test_x[:20]) for task in STREAM])


def grown(router: str | None, seeded: int = 0) -> rankup.IncrementalNet:
    rank = rankup.Rank(0, 0, seeded=64) if seeded else rankup.Rank(4, 1)
    return rankup.grow(rankup.models.mlp(64, hidden=[24]), rank, router=router)


def taught(router: str | None, order: tuple[int, ...] = (0, 1, 2)) -> rankup.IncrementalNet:
    """All tasks stand by themselves, over seeded factors, so that any can go."""
    net = grown(router, seeded=64)
    for index in order:
        rankup.fit(net, STREAM[index], RECIPE, uses="own")
    return net.eval()


def routing(net: rankup.IncrementalNet) -> Routing:
    assert net.routing is not None
    return net.routing


def raw_scores(net: rankup.IncrementalNet, task: int) -> dict[str, Tensor]:
    known, batch = routing(net), RoutedBatch(net, routing(net), X, {})
    return {
        name: known.routers[name].fits(batch, task, known.rows[task].of(name))
        for name in ("energy", "mahalanobis", "means")
    }


def test_told_answers_and_raw_scores_keep_their_bits_as_tasks_come() -> None:
    net = grown(ALL)
    rankup.fit(net, STREAM[0], RECIPE)
    told, scores = net.eval()(X, 0), raw_scores(net, 0)
    row = copy.deepcopy(routing(net).rows[0].tensors)
    for task in STREAM[1:]:
        rankup.fit(net, task, RECIPE)
    assert torch.equal(net(X, 0), told)
    for name, before in scores.items():
        assert torch.equal(raw_scores(net, 0)[name], before), name
    for key, tensor in row.items():
        assert torch.equal(routing(net).rows[0].tensors[key], tensor), key


def test_answer_has_a_probability_for_every_class_of_every_task() -> None:
    net = taught(ALL)
    logits, task = net(X)
    assert logits.shape == (len(X), 6)
    torch.testing.assert_close(logits.exp().sum(1), torch.ones(len(X)))
    guess = net.guess(X)
    assert torch.equal(task, guess.task)
    torch.testing.assert_close(guess.probabilities.sum(1), torch.ones(len(X)))
    shares = torch.stack([part.logsumexp(1) for part in logits.split(2, 1)], 1).exp()
    torch.testing.assert_close(shares, guess.probabilities, atol=1e-4, rtol=0)


def test_analytic_router_finds_tasks_and_one_batch_of_a_task_more_surely() -> None:
    net = taught("analytic, features=256")
    wanted = torch.arange(3).repeat_interleave(20)
    assert (net.guess(X[:60]).task == wanted).float().mean() > 0.8
    for task in range(3):
        guess = net.guess(X[20 * task :][:20], together=True)
        assert int(guess.task) == task
        assert guess.probabilities.shape == (3,)


def test_strange_inputs_fit_none() -> None:
    net = taught("analytic, features=256")
    noise = torch.rand(200, *X.shape[1:], generator=torch.Generator().manual_seed(0))
    assert net.guess(X[:60]).none.mean() < 0.8
    assert (net.guess(noise).none > 0.95).float().mean() > 0.9
    assert net.guess(noise).strangeness.median() > net.guess(X[:60]).strangeness.median()


def test_likeliest_asks_only_so_many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    net = taught("energy, analytic, features=256")
    asked: list[int] = []
    of = RoutedBatch.of

    def counted(self: RoutedBatch, task: int) -> object:
        asked.append(int(self.wanted[:, task].sum()) if self.wanted is not None else len(X))
        return of(self, task)

    monkeypatch.setattr(RoutedBatch, "of", counted)
    logits, _ = net(X, likeliest=1)
    assert sum(asked) <= 2 * len(X)  # for the energy, and for the answer
    assert (logits.isfinite().sum(1) == 2).all()
    assert torch.equal(net.guess(X, likeliest=3).task, net.guess(X).task)


def test_sums_do_not_depend_on_the_order_of_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []

    def recorded(total: Sums, sums: Tensor, counts: Tensor, alike: bool) -> object:
        given.append(torch.cat([total.gram, sums, counts[:, None].expand_as(sums)]))
        return solve(total, sums, counts, alike)

    nets = [taught(APART, order) for order in itertools.permutations(range(3))]
    monkeypatch.setattr(routing_file, "solve", recorded)
    expected = routing(nets[0])._solve()
    for net in nets[1:]:
        found = routing(net)._solve()
        assert torch.equal(given[-1], given[0])  # what all the arithmetic begins with
        order = [net.tasks.index(name) for name in nets[0].tasks]
        columns = torch.cat([torch.arange(6)[routing(net).columns(task)] for task in order])
        assert torch.equal(found.maps[:, columns], expected.maps)


def test_removed_task_leaves_nothing() -> None:
    net, without = taught(APART), taught(APART, (0, 2))
    net.remove_task(STREAM[1].name)
    assert_same_routing(net, without)
    assert torch.equal(net(X).logits, without(X).logits)


def assert_same_routing(net: rankup.IncrementalNet, other: rankup.IncrementalNet) -> None:
    mine, theirs = routing(net).total, routing(other).total
    assert mine is not None
    assert theirs is not None
    assert mine.count == theirs.count
    assert torch.equal(mine.gram, theirs.gram)
    assert [row.name for row in routing(net).rows] == [row.name for row in routing(other).rows]


def test_class_without_samples_changes_nothing_about_others() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(100, 128, (40, 6), generator=generator)  # far from zero
    labels = torch.arange(40) % 2
    sums = torch.zeros(3, 6, dtype=torch.int64).index_add_(0, labels, rows)
    total = Sums.of([rows.float()])
    alone = solve(total, sums[:2], torch.tensor([20, 20]))
    beside = solve(total, sums, torch.tensor([20, 20, 0]))
    assert torch.equal(beside.maps[:, :2], alone.maps)
    assert torch.equal(beside.halves, torch.cat([alone.halves, torch.tensor([torch.inf])]))
    assert torch.equal(beside.within, alone.within)


@pytest.mark.parametrize("router", [APART, "analytic, features=48"])
def test_joined_networks_guess_like_one_that_learned_all(router: str) -> None:
    net, other = taught(router, (0, 1)), taught(router, (2,))
    net.join(other)
    assert_same_routing(net, taught(router))
    assert net(X).logits.shape == (len(X), 6)


def test_one_sum_over_all_tasks_refuses_to_remove_or_to_add_a_task_twice() -> None:
    net = taught("analytic, features=48")
    with pytest.raises(rankup.TaskStateError, match="cannot be removed: .*analytic,apart"):
        net.remove_task(STREAM[1].name)
    assert net.tasks == [task.name for task in STREAM[:3]]
    with pytest.raises(rankup.RankupError, match="know some of the same tasks cannot be joined"):
        net.join(taught("analytic, features=48", (2, 3)))
    with pytest.raises(rankup.RankupError, match="draw|one router can be joined|options differ"):
        net.join(taught("energy", (3,)))


def test_sums_are_exact_in_any_order_and_grouping() -> None:
    rows = torch.randint(-127, 128, (5000, 9), generator=torch.Generator().manual_seed(0)).float()
    whole = Sums.of([rows])
    parts = Sums.of([rows[3000:]]) + Sums.of(rows[:3000].split(7))
    assert torch.equal(whole.gram, rows.long().t() @ rows.long())
    assert torch.equal(whole.gram, parts.gram)
    assert torch.equal((whole - Sums.of([rows[:10]])).gram, Sums.of([rows[10:]]).gram)
    assert whole.packed().dtype == torch.int32
    assert torch.equal(Sums.unpacked(whole.packed(), 5000).gram, whole.gram)
    huge = Sums(whole.gram * 2**20, 1)
    assert huge.packed().dtype == torch.int64


@pytest.mark.parametrize("router", [ALL, APART])
def test_saved_network_guesses_with_the_same_bits(router: str, tmp_path: Path) -> None:
    net = grown(router)
    for task in STREAM[:2]:
        rankup.fit(net, task, RECIPE)
    rankup.save(net.eval(), tmp_path / "net")
    old = sums_files(tmp_path)
    rankup.fit(net, STREAM[2], RECIPE)
    rankup.save(net.eval(), tmp_path / "net")
    loaded = rankup.load(tmp_path / "net")
    assert loaded.router == net.router
    assert torch.equal(loaded(X).logits, net(X).logits)
    assert torch.equal(loaded.guess(X).none, net.guess(X).none)
    assert len(sums_files(tmp_path)) == (0 if "apart" in router else 1)
    assert not old & sums_files(tmp_path) or "apart" in router
    assert rankup.verify(tmp_path / "net")


def sums_files(folder: Path) -> set[Path]:
    return {*(folder / "net").glob("sums-*.safetensors")}


def test_size_counts_the_bytes_that_routers_keep() -> None:
    plain, net = taught(None), taught(ALL)
    total = routing(net).total
    assert total is not None
    in_tasks = sum(t.nbytes for row in routing(net).rows for t in row.tensors.values())
    assert net.size().router_bytes == in_tasks + total.packed().nbytes
    assert net.size().bytes == plain.size().bytes + net.size().router_bytes
    assert net.size(0).router_bytes < net.size().router_bytes
    assert plain.size().router_bytes == 0


def test_damaged_sums_are_found(tmp_path: Path) -> None:
    rankup.save(taught("analytic, features=48"), tmp_path / "net")
    (file,) = sums_files(tmp_path)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "SHA-256 has changed" in str(rankup.verify(tmp_path / "net"))
    with pytest.raises(rankup.StoreError, match="SHA-256 has changed"):
        rankup.load(tmp_path / "net")


def test_network_without_a_router_is_saved_as_before(tmp_path: Path) -> None:
    rankup.save(taught(None), tmp_path / "net")
    manifest = (tmp_path / "net" / "manifest.json").read_text()
    assert "router" not in manifest
    assert "sums" not in manifest
    assert rankup.load(tmp_path / "net").router is None


def test_some_tasks_alone_cannot_be_guessed_where_the_sums_are_over_all(tmp_path: Path) -> None:
    net = taught("analytic, features=48")
    rankup.save(net, tmp_path / "net")
    part = rankup.load(tmp_path / "net", tasks=[STREAM[1].name])
    assert part.router is None
    assert torch.equal(part(X, 0), net(X, 1))
    rankup.save(taught(APART), tmp_path / "apart")
    part = rankup.load(tmp_path / "apart", tasks=[STREAM[0].name, STREAM[1].name])
    assert_same_routing(part, taught(APART, (0, 1)))


def test_router_of_a_loop_of_ones_own_sees_what_commit_is_given() -> None:
    net = grown("energy, mahalanobis, means, analytic, features=16")
    x = to_float(STREAM[0].train_x[:64])
    for name in ("one", "two"):
        net.begin_task(name, classes=2)
        net.commit_task(calibrate=(batch for batch in x.split(32)))
    assert net.eval()(x).logits.shape == (64, 4)
    net.begin_task("three", classes=2)
    with pytest.raises(rankup.TaskStateError, match=r"call commit_task\(calibrate=batches\)"):
        net.commit_task()
    assert net.learning == "three"


def test_task_that_the_router_cannot_see_is_dropped() -> None:
    net = taught("analytic, features=48")
    other = rankup.data.Task(
        "wide", 2, torch.rand(40, 1, 8, 8), torch.arange(40) % 2, X[:4], torch.arange(4) % 2
    )
    known, answers = routing(net), net(X).logits

    def broken(*_: object) -> Iterator[object]:
        raise RuntimeError("out of memory")

    known.routers["analytic"].learn = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        rankup.fit(net, other, RECIPE, uses="own")
    assert net.tasks == [task.name for task in STREAM[:3]]
    assert net.routing is known
    assert torch.equal(net(X).logits, answers)


def test_batch_norms_and_convolutions_are_guessed_for_too() -> None:
    images = torch.rand(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    net = rankup.grow(rankup.models.resnet18(width=4, image_size=16), rankup.Rank(2, 1), router=ALL)
    for name in ("dark", "light"):
        x = images * (0.5 if name == "dark" else 1.0)
        task = rankup.data.Task(name, 2, x, torch.arange(40) % 2, x, torch.arange(40) % 2)
        net.begin_task(name, classes=2)
        net.commit_task(calibrate=[task.train_x])
    assert net.eval()(images).logits.shape == (40, 4)


def test_kept_base_gives_features_without_any_task() -> None:
    torch.manual_seed(0)
    given = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 2))
    net = rankup.grow(given, rankup.Rank(2, 1), base="keep", router="analytic")
    for task in STREAM[:2]:
        rankup.fit(net, task, RECIPE)
    torch.testing.assert_close(base_features(net, X, {}), given[:-1](X))
    assert (net.eval().guess(X[:40]).task == torch.arange(2).repeat_interleave(20)).sum() > 30


@pytest.mark.parametrize(
    ("router", "message"),
    [
        ("apart", "a router is one of energy"),
        ("nearest", "there is no router 'nearest', only energy"),
        ("energy, energy=2", "names 'energy' twice"),
        ("energy=-1", "must be a positive number, got '-1'"),
        ("energy, features=3", "features is an option of the analytic router"),
        ("analytic, features=none", "features must be a number from 1"),
        ("analytic, apart=5", "apart takes no value"),
        (3, "named by a text"),
    ],
)
def test_refused_routers(router: str, message: str) -> None:
    with pytest.raises(rankup.RankupError, match=message):
        grown(router)


def test_router_is_fixed_before_the_first_task() -> None:
    net = grown(None)
    net.router = "energy"
    assert net.router == "energy=1"
    with pytest.raises(rankup.TaskStateError, match="has learned none yet"):
        net(X)
    rankup.fit(net, STREAM[0], RECIPE)
    with pytest.raises(rankup.TaskStateError, match="fixed before its first task"):
        net.router = "means"
    with pytest.raises(rankup.RankupError, match="likeliest needs a router"):
        net(X, likeliest=1)
    with pytest.raises(rankup.RankupError, match="for a tensor of samples"):
        net.guess(X[:0])


def test_drift_tells_inputs_of_a_new_task_from_known_ones() -> None:
    net = taught("analytic, features=256")
    known = net.drift(torch.cat([to_float(task.test_x) for task in STREAM[:3]]))
    assert not known.is_new
    assert "as inputs of known tasks may" in str(known)
    new = net.drift(torch.cat([to_float(task.test_x) for task in STREAM[3:]]))
    assert new.is_new
    assert "learn a new one?" in str(new)
    with pytest.raises(rankup.RankupError, match="false_alarms must be a share"):
        net.drift(X, false_alarms=1.0)


def test_discriminants_may_expect_each_feature_to_vary_in_its_own_way() -> None:
    """So that its units do not matter."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(-3, 4, (60, 5), generator=generator).float()
    labels, counts = torch.arange(60) % 2, torch.tensor([30, 30])
    found = []
    for units in (torch.ones(5), torch.tensor([1.0, 1, 16, 16, 1])):
        given = rows * units
        sums = torch.zeros(2, 5).index_add_(0, labels, given)
        known = [solve(Sums.of([given]), sums, counts, alike) for alike in (False, True)]
        found.append([likelihoods(each, given).classes for each in known])
    (own, alike), (own_in_others, alike_in_others) = found
    torch.testing.assert_close(own_in_others, own)
    assert (alike_in_others - alike).abs().max() > 1e-3


def test_routers_that_know_classes_have_a_say_inside_the_task() -> None:
    """A network that has learned nothing finds classes nevertheless, and only without a task."""
    net = grown("analytic, features=256")
    for task in STREAM[:3]:
        x, y = to_float(task.train_x), task.train_y
        net.begin_task(task.name, classes=2)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        part = [(x, y, {})]
        net.commit_task(examples=Examples(part.copy, part.copy))
    net.eval()
    x, y = X[:60], torch.cat([STREAM[task].test_y[:20] + 2 * task for task in range(3)])
    logits, task = net(x)
    assert torch.equal(net(x, 0), torch.zeros(60, 2))
    assert (logits.argmax(1) == y).float().mean() > 0.8
    shares = torch.stack([part.logsumexp(1) for part in logits.split(2, 1)], 1)
    assert torch.equal(shares.argmax(1), task)
    torch.testing.assert_close(shares.exp(), net.guess(x).probabilities, atol=1e-4, rtol=0)


def test_class_without_samples_can_still_be_the_network_s_answer() -> None:
    net, x = grown("analytic, features=48"), X[:20]
    net.begin_task("odd", classes=3)
    part = [(x, torch.arange(20) % 2, {})]
    net.commit_task(examples=Examples(part.copy, part.copy))
    assert net.eval()(x).logits.isfinite().all()
