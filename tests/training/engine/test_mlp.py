"""The handwritten step equals the one that autograd would take."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.learning import CPU, F64, RANKS, after_steps, assert_agree, learners, task
from rankup.rank import Place, Rank
from rankup.training.batches import Draws, Feed
from rankup.training.engine.eager import Eager
from rankup.training.engine.mlp import ChainLearner, is_chain
from rankup.training.engine.rank import RankLearner
from rankup.training.recipe import Recipe


@pytest.mark.parametrize(
    ("rank", "tasks", "loss"),
    [
        *((rank, 2, "cross-entropy") for rank in RANKS),
        (RANKS[0], 0, "cross-entropy"),
        (RANKS[1], 0, "mse"),
        (RANKS[2], 2, "mse"),
    ],
)
def test_step_by_hand_agrees_with_autograd(rank: Rank, tasks: int, loss: Any) -> None:
    recipe = Recipe(batch=8, weight_decay=0.1, loss=loss)
    plain = learners(RankLearner, rank=rank, tasks=tasks, recipe=recipe)
    by_hand = learners(ChainLearner, rank=rank, tasks=tasks, recipe=recipe)
    assert_agree(after_steps(Eager(plain)), after_steps(Eager(by_hand)))


def test_step_by_hand_takes_augmented_images() -> None:
    stream = rankup.data.make_stream("p-digits", tasks=1)
    recipe = Recipe(batch=32, flip=True, crop=2, pixels="centred")
    found = []
    for kind in (RankLearner, ChainLearner):
        net = rankup.grow(rankup.models.mlp(64, hidden=[16]).to(F64), Rank(3, 1))
        net.begin_task("open", 10)
        feed = Feed(stream[0], recipe, CPU, F64)
        assert is_chain(net, feed)
        found.append(after_steps(Eager([kind(net.train(), feed)])))
    assert_agree(*found)


@pytest.mark.parametrize(
    ("tasks", "pixels", "bias"),
    [(0, "unit", True), (1, "unit", False), (1, "centred", True), (0, "raw", False)],
)
def test_step_by_hand_takes_bytes(tasks: int, pixels: str, bias: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 256, (60, 12), generator=draw, dtype=torch.uint8), torch.arange(60) % 3
    data = rankup.Task("bytes", 3, x, y, x[:9], y[:9])
    found = []
    for kind in (RankLearner, ChainLearner):
        layers = [nn.Linear(12, 10, bias), nn.ReLU(), nn.Linear(10, 8, bias), nn.ReLU()]
        module = nn.Sequential(*layers, nn.Linear(8, 3, bias)).to(F64)
        net = rankup.grow(module, Rank(3, 1), seed=1)
        for index in range(tasks):
            net.begin_task(f"{index}", 3)
            net.commit_task()
        net.begin_task("open", 3)
        feed = Feed(data, Recipe(batch=10, pixels=pixels), CPU, F64)
        assert is_chain(net, feed)
        found.append(after_steps(Eager([kind(net.train(), feed)]), count=6))
    (losses, (one,)), (others, (other,)) = found
    # Bytes are scaled in float32 if that happens before anything else.
    torch.testing.assert_close(losses, others, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_small_step_uses_one_thread() -> None:
    seen = []

    class Watched(ChainLearner):
        def gradient(self, draw: Draws) -> tuple[Tensor, Sequence[Tensor]]:
            seen.append(torch.get_num_threads())
            return super().gradient(draw)

    small, large = learners(Watched), learners(Watched, rank=Rank(0, 0, seeded=2**15))
    assert (small[0].threads, large[0].threads) == (1, None)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        after_steps(Eager(small), count=1)
        after_steps(Eager(large), count=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2]


class Odd(nn.Module):
    """Not a chain: something else between its layers."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x))
        if self.between == "skip":
            y = y + torch.relu(self.b(y))
        elif self.between == "none":
            y = self.b(y)
        elif self.between == "gelu":
            y = nn.functional.gelu(self.b(y))
        else:
            y = torch.relu(self.b(torch.relu(self.b(y))))
        return self.head(y)


@pytest.mark.parametrize("between", ["skip", "none", "gelu", "twice"])
def test_other_modules_are_no_chains(between: str) -> None:
    net = rankup.grow(Odd(between), Rank(2, 1))
    assert net.plan.chain is None
    assert not is_chain(net, Feed(task(0), Recipe(), CPU))


def test_bfloat16_and_kept_weights_use_autograd() -> None:
    net = rankup.grow(rankup.models.mlp(12, hidden=[10, 8]), Rank(2, 1))
    net.begin_task("open", 3)
    assert net.plan.chain == ("hidden.0", "hidden.1")
    assert is_chain(net, Feed(task(0), Recipe(), CPU))
    assert is_chain(net, Feed(task(0), Recipe(loss="mse"), CPU))
    assert not is_chain(net, Feed(task(0), Recipe(precision="bfloat16"), CPU))
    kept = rankup.grow(rankup.models.mlp(12, hidden=[10, 8]), Rank(2, 1), base="keep")
    assert not is_chain(kept, Feed(task(0), Recipe(), CPU))


@pytest.mark.parametrize(
    ("kind", "rank"), [*((ChainLearner, rank) for rank in RANKS), (RankLearner, RANKS[2])]
)
def test_padding_tables_changes_nothing(kind: type[RankLearner], rank: Rank) -> None:
    recipe = Recipe(batch=8, weight_decay=0.1)
    bare = learners(kind, rank=rank, recipe=recipe)
    padded = learners(kind, rank=rank, recipe=recipe, pad=16)
    assert_agree(after_steps(Eager(bare)), after_steps(Eager(padded)))
    tables = [
        tensor for name, tensor in padded[0].step_inputs().items() if name.endswith((".U", ".V"))
    ]
    assert len(tables) == 4
    assert all(len(table) % 16 == 0 for table in tables)
    for learner in padded:  # the network itself has no rows of zeros
        assert all(
            len(layer.U) == layer.spec.rank.used(Place.number(1))
            for layer in learner._factored.values()
        )


@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
def test_stacked_replicas_agree_with_each_alone(loss: Any) -> None:
    """What a captured graph of stacked replicas computes, computed on the CPU."""
    together = learners(ChainLearner, 3, recipe=Recipe(batch=8, loss=loss))
    first = together[0]
    stacked = {
        name: torch.stack([learner.step_inputs()[name] for learner in together])
        for name in first.step_inputs()
    }
    stacked |= {
        name: torch.stack([learner.learned()[name].detach() for learner in together])
        for name in first.learned()
    }
    draws = [each.sample_epoch(torch.Generator().manual_seed(n)) for n, each in enumerate(together)]
    draw = {name: torch.stack([drawn[name][0] for drawn in draws]) for name in draws[0]}
    with first.bound(stacked):
        losses, grads = first.gradient(draw)
    for number, learner in enumerate(together):
        with learner.bound({}):
            loss, alone = learner.gradient({name: entry[number] for name, entry in draw.items()})
        torch.testing.assert_close(losses[number], loss, rtol=1e-12, atol=0)
        for grad, own in zip(grads, alone, strict=True):
            torch.testing.assert_close(grad[number], own, rtol=1e-9, atol=1e-12)


def test_compiled_body_is_no_chain() -> None:
    net = rankup.grow(rankup.models.mlp(12, hidden=[10, 8]), Rank(3, 1))
    net.begin_task("0", 3)
    feed = Feed(task(0), Recipe(batch=8), CPU)
    assert is_chain(net, feed)
    net.body = torch.compile(net.body, backend="eager")  # its parameters have other names
    assert not is_chain(net, feed)
