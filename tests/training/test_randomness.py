"""Modules that draw random numbers by themselves, and epochs that are kept."""

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.zoo import GPU
from rankup.training.batches import in_equal_parts
from rankup.training.checkpoint import Checkpoint
from rankup.training.engine.rank import RankLearner
from rankup.training.loop import Epoch

DIGITS = rankup.data.make_stream("s-digits", tasks=2)
FEW = rankup.Recipe(epochs=8)


class Drawing(nn.Module):
    """Skips a layer at random, as drawn by Python and NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x.flatten(1)).relu()
        if not self.training or random.random() < 0.8 * np.random.rand():  # noqa: NPY002
            x = x + self.b(x).relu()
        answer: Tensor = self.head(x)
        return answer


def learned(**options: Any) -> dict[str, Tensor]:
    net = rankup.grow(Drawing(), rankup.Rank(4, 1))
    rankup.fit(net, DIGITS[0], FEW, **options)
    return net.state_dict()


def test_what_python_draws_follows_from_seed() -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    expected = random.random(), np.random.rand()  # noqa: NPY002
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    kept: list[Checkpoint] = []
    one = learned(on_epoch=lambda _, checkpoint: kept.append(checkpoint))
    assert (random.random(), np.random.rand()) == expected  # noqa: NPY002
    other, resumed = learned(), learned(resume=kept[3])
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name])
        assert torch.equal(tensor, resumed[name])


@GPU
def test_steps_with_python_randomness_are_not_captured() -> None:
    net = rankup.grow(Drawing(), rankup.Rank(4, 1)).to("cuda")
    with pytest.warns(UserWarning, match="cannot be captured: the module draws random numbers"):
        rankup.fit(net, DIGITS[0].to("cuda"), FEW)


def test_epochs_that_are_kept_keep_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, init = weakref.WeakSet[RankLearner](), RankLearner.__init__

    def noted(self: RankLearner, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        alive.add(self)

    monkeypatch.setattr(RankLearner, "__init__", noted)
    net, epochs = rankup.grow(rankup.models.mlp(64), rankup.Rank(11, 1)), list[Epoch]()
    rankup.fit(net, DIGITS[0], FEW, on_epoch=lambda epoch, _: epochs.append(epoch))
    gc.collect()
    assert len(epochs) == 8
    assert not alive
    with pytest.raises(rankup.TaskStateError, match="only while the task is being learned"):
        epochs[0].accuracy()


@pytest.mark.parametrize(("rows", "most"), [(76_801, 256), (10, 4), (2049, 2048), (5, 8)])
def test_equal_parts_are_equal(rows: int, most: int) -> None:
    sizes = [len(part) for part in in_equal_parts(torch.zeros(rows), most)]
    assert sum(sizes) == rows
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
