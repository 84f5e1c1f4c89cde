"""Modules that `fit` refuses before anything is learned."""

from collections.abc import Callable

import pytest
from torch import Tensor, nn

import rankup
from helpers.own_modules import RECIPE, halves, mlp
from rankup.rank import Rank


def test_sample_without_batch_dimension_is_refused() -> None:
    net = rankup.grow(mlp(), Rank(2, 1))
    net.begin_task("a", 2)
    expected = r"'0' expects \[samples, …, 12 features\], got an input of shape \[12\]"
    with pytest.raises(rankup.RankupError, match=expected):
        net(halves().test_x[0], task="a")


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        (lambda logits: {"logits": logits}, "got dict"),
        (lambda logits: (logits, logits), "got tuple"),
        (lambda logits: logits[:, None].expand(-1, 3, -1), r"got \[2, 3, 2\]"),
    ],
)
def test_answers_that_are_not_logits_are_refused(
    answer: Callable[[Tensor], object], given: str
) -> None:
    class Answers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(12, 16), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> object:
            return answer(self.head(self.hidden(x).relu()))

    net = rankup.grow(Answers(), Rank(4, 1), head="head")
    steps: list[object] = []
    with pytest.raises(rankup.RankupError, match=rf"returns a tensor of logits, .* {given}"):
        rankup.fit(net, halves(), RECIPE, on_epoch=lambda *done: steps.append(done))
    assert not steps
    assert net.learning is None


def test_answers_in_training_must_be_logits_too() -> None:
    class Aided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(12, 16), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> object:
            logits = self.head(self.hidden(x).relu())
            return (logits, logits) if self.training else logits

    net = rankup.grow(Aided(), Rank(4, 1), head="head")
    with pytest.raises(rankup.RankupError, match="returns a tensor of logits, .* got tuple"):
        rankup.fit(net, halves(), RECIPE)
