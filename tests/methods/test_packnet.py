"""PackNet: every weight has one owner, the only task that ever changed it."""

from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.rivals import answers, same
from rankup.data.streams import Stream, make_stream
from rankup.data.tasks import Task
from rankup.methods.packnet import PackNet, PackNetLearner
from rankup.methods.shared.bits import pack, unpack
from rankup.testing import make_method
from rankup.training.batches import Feed
from rankup.training.engine.eager import Eager, Steps
from rankup.training.recipe import Recipe

TASKS = 4
NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: rankup.models.mlp(64, hidden=[25, 15]),
    "resnet18": lambda: rankup.models.resnet18(width=4, image_size=8, channels=1),
}


@pytest.fixture(scope="module")
def stream() -> Stream:
    stream = make_stream("p-digits", tasks=TASKS)
    few = [replace(t, train_x=t.train_x[:192], train_y=t.train_y[:192]) for t in stream]
    return replace(stream, tasks=tuple(few))


def make(
    stream: Stream,
    net: str = "mlp",
    recipe: Recipe | None = None,
    **options: float,
) -> PackNet:
    recipe = recipe or Recipe(epochs=4, batch=64, weight_decay=0.3)
    method = make_method("packnet", stream, NETS[net](), options=options, **asdict(recipe))
    assert isinstance(method, PackNet)
    return method


def begin(method: PackNet, task: Task) -> PackNetLearner:
    learner = method.begin(task)
    assert isinstance(learner, PackNetLearner)
    return learner


def train(steps: Steps) -> None:
    (learner,) = steps.learners
    feed = learner.feed
    for epoch in range(feed.recipe.epochs):
        draws = learner.sample_epoch(torch.Generator().manual_seed(epoch))
        steps.on_epoch_start(epoch)
        steps.epoch([draws], [[feed.recipe.lr] * feed.steps_per_epoch], epoch)
    steps.adopt()


def teach(method: PackNet, task: Task) -> None:
    """Learn a task, well or not."""
    train(Eager([begin(method, task)]))
    method.end()


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_weights_stay_as_their_owner_left_them(optimiser: str, stream: Stream) -> None:
    recipe = Recipe(epochs=4, batch=64, optimiser=optimiser, weight_decay=0.3)
    method, old = make(stream, recipe=recipe), list[Tensor]()
    left = {name: torch.zeros_like(weight) for name, weight in method.weights.items()}
    for number, task in enumerate(stream, start=1):
        before = {name: method.owners(name) for name in method.weights}
        teach(method, task)
        for name, weight in method.weights.items():
            owners = method.owners(name)
            had = before[name] > 0
            assert torch.equal(owners[had], before[name][had])  # owners never change
            assert torch.equal(weight[had], left[name][had])
            assert set(owners[~had].unique().tolist()) <= {0, number}
            assert (weight[owners == 0] == 0).all()
            assert (weight[owners == number] != 0).all()
            left[name] = weight.detach().clone()
        now = answers(method, stream)
        assert not old or same(old, now)
        old = now
    assert len(old) == TASKS


@pytest.mark.parametrize("net", NETS)
def test_every_task_gets_an_equal_share_of_every_layer(net: str, stream: Stream) -> None:
    method = make(stream, net)
    for task in stream:
        begin(method, task).prune()
        method.end()
    for name, weight in method.weights.items():
        counts = torch.bincount(method.owners(name).flatten(), minlength=TASKS + 1).tolist()
        assert counts[0] == 0
        assert all(abs(count - weight.numel() / TASKS) <= 1 for count in counts[1:])


def test_the_largest_free_weights_are_kept(stream: Stream) -> None:
    method = make(stream)
    teach(method, stream[0])
    learner = begin(method, stream[1])
    before = {name: weight.detach().clone() for name, weight in method.weights.items()}
    learner.on_epoch_start(learner.pruned_before - 1)
    assert all(torch.equal(weight, before[name]) for name, weight in method.weights.items())
    learner.on_epoch_start(learner.pruned_before)
    for name, weight in method.weights.items():
        owned, was, is_now = (
            t.flatten().tolist() for t in (method.owners(name), before[name], weight)
        )
        free = sorted((i for i, owner in enumerate(owned) if not owner), key=lambda i: -abs(was[i]))
        mine = set(free[: round(len(free) / (TASKS - 1))])
        assert 0 < len(mine) < len(free)
        for i, value in enumerate(is_now):
            assert value == (was[i] if owned[i] or i in mine else 0)


def test_task_runs_with_its_own_and_earlier_weights(stream: Stream) -> None:
    method = make(stream)
    for task in stream.tasks[:3]:
        teach(method, task)
    begin(method, stream[3])  # its free weights are none of theirs
    for task, found in enumerate(answers(method, stream)):
        x = next(Feed(stream[task], method.recipe, method.device).test())[0].flatten(1)
        for layer in ("hidden.0", "hidden.1"):
            weight = method.weights[f"{layer}.weight"].detach().clone()
            owners = method.owners(f"{layer}.weight")
            for i, j in torch.cartesian_prod(*map(torch.arange, weight.shape)):
                if owners[i, j] not in range(1, task + 2):
                    weight[i, j] = 0
            x = torch.relu(x @ weight.T + method.kept[f"{layer}.bias"][task])
        head = method.head.added(task)
        torch.testing.assert_close(x @ head["weight"].T + head["bias"], found)


def test_biases_are_per_task(stream: Stream) -> None:
    method = make(stream)
    rows = []
    for task in stream.tasks[:2]:
        teach(method, task)
        rows.append({name: bias.detach().clone() for name, bias in method.biases.items()})
    for name in method.biases:
        assert torch.equal(method.kept[name], torch.stack([row[name] for row in rows]))
        assert not torch.equal(rows[0][name], rows[1][name])


def test_free_weights_are_drawn_anew_from_the_seed(stream: Stream) -> None:
    drawn = []
    for noise in (1, 2):
        method = make(stream)
        teach(method, stream[0])
        torch.manual_seed(noise)
        begin(method, stream[1])
        weight = method.weights["hidden.0.weight"].detach()
        free = weight[method.owners("hidden.0.weight") == 0]
        assert free.abs().max() <= 1 / 8  # 1 / √inputs, as torch draws them
        assert free.std() == pytest.approx(1 / 8 / 3**0.5, rel=0.1)
        drawn.append(free)
    assert torch.equal(*drawn)


@pytest.mark.parametrize(
    ("epochs", "retrain", "before"), [(9, 1 / 3, 6), (1, 0.5, 0), (1, 0.0, 1), (30, 0.01, 29)]
)
def test_retraining_takes_a_share_of_epochs(
    epochs: int, retrain: float, before: int, stream: Stream
) -> None:
    method = make(stream, recipe=Recipe(epochs=epochs, batch=64), retrain=retrain)
    assert begin(method, stream[0]).pruned_before == before


@pytest.mark.parametrize("retrain", [0.0, 0.5, 1.0])
def test_it_is_pruned_when_it_ends(retrain: float, stream: Stream) -> None:
    method = make(stream, recipe=Recipe(epochs=1, batch=64), retrain=retrain)
    teach(method, stream[0])
    for name, weight in method.weights.items():
        used = weight != 0
        assert torch.equal(used, method.owners(name) == 1)
        assert int(used.sum()) == round(weight.numel() / TASKS)


@pytest.mark.parametrize("bits", [1, 3, 5, 8, 9])
@pytest.mark.parametrize("count", [0, 7, 8, 61])
def test_bits_come_back_and_leave_no_gap(bits: int, count: int) -> None:
    given = torch.randint(2**bits, (count,), generator=torch.Generator().manual_seed(bits))
    packed = pack(given, bits)
    assert packed.dtype == torch.uint8
    assert packed.nbytes == -(-bits * count // 8)
    assert unpack(packed, bits, count).tolist() == given.tolist()


def test_one_task_too_many_is_refused(stream: Stream) -> None:
    method = make(stream)
    for task in stream:
        method.learn(task, None, None)
    weights = {name: weight.clone() for name, weight in method.weights.items()}
    with pytest.raises(rankup.RankupError, match=f"among {TASKS} tasks, but there is one more"):
        method.learn(replace(stream[0], name="more"), None, None)
    assert all(torch.equal(method.weights[name], weight) for name, weight in weights.items())
