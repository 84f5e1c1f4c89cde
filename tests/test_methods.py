"""Every method keeps the same promises; one that is registered is tested here."""

from pathlib import Path

import pytest
import torch

import rankup
from rankup.data.streams import Stream, make_stream
from rankup.feed import Feed
from rankup.methods import METHODS, method_class
from rankup.methods.base import Method, Setting
from rankup.metrics import AccuracyMatrix
from rankup.plan import Growth
from rankup.rank import Rank
from rankup.recipe import Recipe
from rankup.train import Checkpoint, Epoch, accuracy

# Methods that may change old tasks. All others must keep every bit of them.
FORGETTING = {"finetune"}

CPU = torch.device("cpu")
NETS = {
    "mlp": lambda: rankup.models.mlp(64, hidden=[32, 32]),
    "resnet18": lambda: rankup.models.resnet18(width=4, image_size=8, channels=1),
}


@pytest.fixture(scope="module")
def stream() -> Stream:
    return make_stream("p-digits", tasks=3)


def make(name: str, net: str = "mlp", epochs: int = 3, lr: float = 1e-2) -> Method:
    growth = Growth(Rank(3, 1), "new", None, (), None, None, 0)
    recipe = Recipe(epochs=epochs, batch=128, lr=lr)
    return method_class(name)(Setting(NETS[net](), growth, recipe, 0))


def answers(method: Method, stream: Stream, task: int) -> torch.Tensor:
    x = next(Feed(stream[task], method.setting.recipe, CPU).test())[0]
    with torch.no_grad():
        return method.predict(x, task)


def measured(method: Method, stream: Stream) -> AccuracyMatrix:
    matrix = AccuracyMatrix()
    for index, task in enumerate(stream):
        method.learn(task, None, None)
        row = []
        for j in range(index + 1):
            feed = Feed(stream[j], method.setting.recipe, CPU)
            row.append(accuracy(lambda x, j=j: method.predict(x, j), feed.test()))
        matrix.add(row)
    return matrix


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", METHODS)
def test_it_learns_and_the_metrics_see_what_it_forgets(name: str, net: str, stream: Stream) -> None:
    method = make(name, net, epochs=15 if net == "mlp" else 3)
    matrix = measured(method, stream)
    assert method.learned == 3
    assert matrix.rows[0][0] > 0.5
    if name in FORGETTING:
        assert matrix.forgetting() > 0.05
    else:
        assert matrix.forgetting() == 0


@pytest.mark.parametrize("name", METHODS)
def test_what_it_saves_comes_back_bit_for_bit(name: str, stream: Stream, tmp_path: Path) -> None:
    method = make(name)
    for task in stream.tasks[:2]:
        method.learn(task, None, None)
    method.save(tmp_path / "net")
    loaded = method_class(name).load(tmp_path / "net", make(name).setting)
    assert loaded.learned == 2
    assert loaded.footprint() == method.footprint()
    for one in (method, loaded):
        one.learn(stream[2], None, None)
    for task in range(3):
        assert torch.equal(answers(method, stream, task), answers(loaded, stream, task))


@pytest.mark.parametrize("name", METHODS)
def test_it_goes_on_from_a_checkpoint_as_if_nothing_had_happened(name: str, stream: Stream) -> None:
    kept: list[Checkpoint] = []

    def keep(_: Epoch, checkpoint: Checkpoint) -> None:
        state = {key: tensor.clone() for key, tensor in checkpoint.state.items()}
        kept.append(Checkpoint(checkpoint.epoch, state))

    whole, again = make(name, "resnet18"), make(name, "resnet18")
    whole.learn(stream[0], None, keep)
    again.learn(stream[0], kept[0], None)
    assert torch.equal(answers(whole, stream, 0), answers(again, stream, 0))


@pytest.mark.parametrize("name", METHODS)
def test_a_task_that_fails_leaves_it_as_it_was(name: str, stream: Stream) -> None:
    method = make(name)
    method.learn(stream[0], None, None)
    before, footprint = answers(method, stream, 0), method.footprint()

    def interrupt(epoch: Epoch, checkpoint: Checkpoint) -> None:
        raise rankup.TaskFailed("on purpose")

    with pytest.raises(rankup.TaskFailed):
        method.learn(stream[1], None, interrupt)
    assert method.learned == 1
    assert torch.equal(answers(method, stream, 0), before)
    assert method.footprint() == footprint


def test_what_is_stored_is_counted() -> None:
    stream = make_stream("p-digits", tasks=2)
    rank, finetune = make("rank", epochs=1), make("finetune", epochs=1)
    for task in stream:
        rank.learn(task, None, None)
        finetune.learn(task, None, None)
    shared = 64 * 32 + 32 + 32 * 32 + 32
    assert finetune.footprint().parameters == shared + 2 * (32 * 10 + 10)
    factors = 4 * (64 + 32 + 32 + 32)
    assert rank.footprint().parameters == factors + 2 * (3 + 4) + 2 * 64 + 2 * (32 * 10 + 10)
    assert rank.footprint().buffer == finetune.footprint().buffer == 0


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(rankup.RankupError, match="there is no method 'magic', only rank, finetune"):
        method_class("magic")
