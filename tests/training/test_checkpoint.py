"""Checkpoints that `fit` hands out and resumes from."""

import pickle
from dataclasses import replace

import pytest
from torch import Tensor

import rankup
from helpers.clusters import QUICK, clusters, net
from helpers.zoo import assert_same_bits, logits
from rankup.data.streams import make_stream
from rankup.rank import Rank
from rankup.training.checkpoint import Checkpoint, CheckpointError
from rankup.training.engine.eager import Eager
from rankup.training.loop import Epoch
from rankup.training.recipe import Recipe

SHORT = replace(QUICK, epochs=6)


@pytest.fixture(scope="module")
def checkpoints() -> list[Checkpoint]:
    """One for each epoch, as they are kept on disk."""
    kept: list[Checkpoint] = []
    rankup.fit(net(), clusters(), SHORT, on_epoch=lambda _, checkpoint: kept.append(checkpoint))
    loaded: list[Checkpoint] = pickle.loads(pickle.dumps(kept))
    return loaded


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("augmented", [True, False])
def test_resuming_gives_the_same_bits(reads: bool, augmented: bool) -> None:
    task = make_stream("p-digits", tasks=2)[1]
    recipe = Recipe(epochs=3, batch=256, flip=augmented, crop=int(augmented))
    kept: list[Checkpoint] = []

    def keep(_: Epoch, checkpoint: Checkpoint) -> None:
        kept.append(checkpoint)
        assert not reads or checkpoint.state  # or it is copied once the callback has returned

    def digits_net() -> rankup.IncrementalNet:
        return rankup.grow(rankup.models.mlp(64, hidden=[16, 16]), Rank(2, 1, seeded=4), seed=1)

    whole = rankup.fit(digits_net(), task, recipe, on_epoch=keep)
    assert [checkpoint.epoch for checkpoint in kept] == [1, 2, 3]
    x = task.test_x.flatten(1).float()
    for checkpoint in kept:
        resumed = rankup.fit(digits_net(), task, recipe, resume=checkpoint)
        assert_same_bits(logits(whole, x), logits(resumed, x))


def test_checkpoint_kept_before_an_interrupt_resumes() -> None:
    kept: list[Checkpoint] = []

    def stop(_: Epoch, checkpoint: Checkpoint) -> None:
        kept.append(checkpoint)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rankup.fit(net(), clusters(), SHORT, on_epoch=stop)
    resumed = rankup.fit(net(), clusters(), SHORT, resume=kept[0])
    whole, x = rankup.fit(net(), clusters(), SHORT), clusters().test_x
    assert_same_bits(logits(whole, x), logits(resumed, x))


def test_state_is_copied_only_on_access(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    state = Eager.state

    def counted(steps: Eager, number: int) -> dict[str, Tensor]:
        copied.append(number)
        return state(steps, number)

    monkeypatch.setattr(Eager, "state", counted)
    rankup.fit(net(), clusters(), SHORT, on_epoch=lambda epoch, checkpoint: None)
    assert copied == []


@pytest.mark.parametrize(
    ("name", "seed", "recipe", "message"),
    [
        ("other", 0, SHORT, "is for task 'clusters', but this is 'other'"),
        ("clusters", 1, SHORT, "is for seed 0, but this is 1"),
        ("clusters", 0, replace(SHORT, lr=1e-3), "was made with a different recipe"),
    ],
)
def test_checkpoint_of_another_task_seed_or_recipe_is_refused(
    name: str, seed: int, recipe: Recipe, message: str, checkpoints: list[Checkpoint]
) -> None:
    network = net()
    with pytest.raises(CheckpointError, match=f"the checkpoint {message}"):
        rankup.fit(network, clusters(name), recipe, seed=seed, resume=checkpoints[3])
    assert network.tasks == []
    rankup.fit(network, clusters(), SHORT, seed=0, resume=checkpoints[3])


def test_checkpoint_of_a_smaller_network_is_refused() -> None:
    """If no task adds factors, its tensors would fit."""
    kept: list[Checkpoint] = []
    first, second = clusters("first"), clusters("second", seed=1)
    rank = Rank(0, 0, seeded=32)
    rankup.fit(net(rank=rank), second, SHORT, on_epoch=lambda _, point: kept.append(point))
    network = rankup.fit(net(rank=rank), first, SHORT)
    with pytest.raises(CheckpointError, match="knew 0 tasks, but this one knows 1"):
        rankup.fit(network, second, SHORT, resume=kept[2])
    assert network.tasks == ["first"]


@pytest.mark.parametrize(
    ("rank", "recipe", "message"),
    [
        (
            Rank(3, 1),
            SHORT,
            r"different network or optimiser: 'flat' is float32 \[\d+\] in",
        ),
        (Rank(2, 1), replace(SHORT, optimiser="sgd"), "'mean' is float32 .* but missing here"),
        (Rank(2, 1), replace(SHORT, epochs=5), "was made after epoch 6, but the recipe has 5"),
    ],
)
def test_checkpoint_with_other_tensors_is_refused(
    rank: Rank, recipe: Recipe, message: str, checkpoints: list[Checkpoint]
) -> None:
    stored = Checkpoint(6, checkpoints[-1].state)  # a folder holds no more
    network = net(rank=rank)
    with pytest.raises(CheckpointError, match=message):
        rankup.fit(network, clusters(), recipe, resume=stored)
    assert network.learning is None
