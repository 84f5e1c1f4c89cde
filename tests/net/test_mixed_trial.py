"""Before a mixed batch runs, its module is tried with fewer samples: what must be refused is, and
nothing else."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankup
from rankup.rank import Rank


class Watched(nn.Module):
    """Counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.runs = 0

    def forward(self, x: Any, **options: Any) -> Tensor:
        self.runs += 1
        return self.answer(x)

    def answer(self, x: Any) -> Tensor:
        logits: Tensor = self.head(self.hidden(x).relu())
        return logits


@dataclass
class Batch:
    x: Tensor


class OfBatches(Watched):
    def answer(self, x: Any) -> Tensor:
        return super().answer(x["x"] if isinstance(x, UserDict) else x.x)


class Squeezes(Watched):
    def answer(self, x: Any) -> Tensor:
        return super().answer(x[:, None].squeeze())


class InGroups(Watched):
    """Mixes samples in groups of four: there must be at least four."""

    def answer(self, x: Any) -> Tensor:
        return super().answer((x.view(4, -1, 4) - x.view(4, -1, 4).mean(0)).view(-1, 4))


class OfFour(Watched):
    def answer(self, x: Any) -> Tensor:
        assert len(x) % 4 == 0, "four samples make a group"
        return super().answer(x)


class OtherwiseRound(Watched):
    def answer(self, x: Any) -> Tensor:
        return super().answer(x.transpose(0, 1)).transpose(0, 1)


def knowing(module: nn.Module) -> rankup.IncrementalNet:
    net = rankup.grow(module, Rank(2, 1), head="head")
    for task in "ab":
        net.begin_task(task, 3)
        net.commit_task()
    return net.eval()


def runs(net: rankup.IncrementalNet) -> int:
    count: int = net.body.runs
    return count


@pytest.mark.parametrize("batch", [Batch, lambda x: UserDict(x=x)])
def test_inputs_that_cannot_be_cut_run_untried(batch: Any) -> None:
    net, x = knowing(OfBatches()), torch.randn(6, 4)
    answer = net(batch(x), task=[0, 1] * 3)
    torch.testing.assert_close(answer[:1], net(batch(x[:1]), task=0))
    torch.testing.assert_close(answer[1:2], net(batch(x[1:2]), task=1))


@pytest.mark.parametrize("samples", [2, 3, 8])
def test_module_may_squeeze(samples: int) -> None:
    net, x = knowing(Squeezes()), torch.randn(samples, 4)
    torch.testing.assert_close(net(x, task=[1] * samples), net(x, task=1))


@pytest.mark.parametrize("kind", [InGroups, OfFour])
@pytest.mark.parametrize("options", [{}, {"scale": 1.0}])
def test_module_may_need_more_samples_than_trial(
    options: dict[str, float], kind: type[Watched]
) -> None:
    net, x = knowing(kind()), torch.randn(8, 4)
    torch.testing.assert_close(net(x, task=[1] * 8, **options), net(x, task=1))


@pytest.mark.parametrize("samples", [2, 5])
@pytest.mark.parametrize("options", [{}, {"scale": 1.0}])
def test_sequence_first_module_is_refused(options: dict[str, float], samples: int) -> None:
    net = knowing(OtherwiseRound())
    says = f"before the {samples} of the mixed batch: layer 'hidden' got {samples} rows"
    for _ in range(2):
        with pytest.raises(rankup.RankupError, match=says):
            net(torch.randn(samples, samples, 4), task=[0] * samples, **options)


def test_kind_of_call_is_tried_once() -> None:
    net, x = knowing(Watched()), torch.randn(6, 4)
    for number in range(50):
        net(x, task=[0, 1] * 3, scale=0.01 * number, of=object(), by=torch.full((3,), number))
    assert runs(net) == 51
    net(x, task=[0, 1] * 3, scale=None, of=object(), by=torch.zeros(3))
    assert runs(net) == 53  # what was a number is none
