"""Mixed batches task after task: what is split, and what cannot be joined."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankup


class Attention(nn.Module):
    """Runs task after task, since attention reads its own weights. Takes a mask that has the batch
    in its second dimension, scales that samples may share, and gives a loss and a cache, too."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(
        self,
        words: Tensor,
        mask: Tensor | None = None,
        scale: Tensor | None = None,
        nested: dict[str, Tensor] | None = None,
        more: bool = False,
    ) -> Any:
        x = words
        if mask is not None:
            assert mask.shape == x.shape[1::-1]
            x = x * mask.t()[..., None]
        if scale is not None:
            x = x * (scale if len(scale) == x.shape[-1] else scale[:, None, None])
        if nested is not None:
            x = x + nested["added"]
        logits = self.head(self.attention(x, x, x)[0].mean(1))
        if not more:
            return logits
        loss = logits.square().sum()
        return {"loss": loss, "logits": logits, "cache": Cache(), "layers": 1, "name": "attention"}


class Cache:
    pass


def network() -> rankup.IncrementalNet:
    torch.manual_seed(0)
    net = rankup.grow(Attention(), rankup.Rank(4, 2), base="keep")
    for task, classes in (("a", 2), ("b", 4)):
        net.begin_task(task, classes)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape))
        net.commit_task()
    assert net.plan.substitutes
    return net.eval()


TASKS = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0])
X = torch.randn(len(TASKS), 5, 8, generator=torch.Generator().manual_seed(1))


def assert_rows(net: rankup.IncrementalNet, found: Tensor, **options: Any) -> None:
    """The rows of a mixed batch are those of the tasks' own batches."""
    for task in (0, 1):
        own = net(X, task=task, **options)
        rows = task == TASKS
        torch.testing.assert_close(found[rows][:, : own.shape[1]], own[rows])
        assert bool((found[rows][:, own.shape[1] :] == -torch.inf).all())


def test_first_dimension_is_split() -> None:
    net, nested = network(), {"added": torch.randn(len(TASKS), 5, 8)}
    assert_rows(net, net(X, task=TASKS, nested=nested), nested=nested)


def test_split_names_another_dimension() -> None:
    net, mask = network(), torch.rand(5, len(TASKS))
    for dimension in (1, -1):
        assert_rows(net, net(X, task=TASKS, mask=mask, split={"mask": dimension}), mask=mask)


def test_split_by_none_shares_what_is_as_long_as_the_batch() -> None:
    net, scale = network(), torch.rand(8)  # one per feature, of which there are as many as samples
    assert_rows(net, net(X, task=TASKS, scale=scale, split={"scale": None}), scale=scale)
    split = net(X, task=TASKS, scale=scale)  # without a word it is taken for one per sample
    assert not torch.allclose(split[:, 0], net(X, task=0, scale=scale)[:, 0])


def test_split_of_unknown_argument_is_said() -> None:
    with pytest.raises(rankup.RankupError, match="split names 'masks', which is none of"):
        network()(X, task=TASKS, split={"masks": 1})


def test_batch_that_cannot_be_split_is_said() -> None:
    net = network()
    with pytest.raises(rankup.RankupError, match="none of its arguments is a tensor whose first"):
        net(task=TASKS, words=X, split={"words": None})


def test_what_has_no_row_per_sample_says_so_when_used() -> None:
    found = network()(X, task=TASKS, more=True)
    assert_rows(network(), found["logits"])
    assert (found["layers"], found["name"]) == (1, "attention")
    for key, kind in (("loss", "Tensor"), ("cache", "Cache")):
        for use in (lambda v: v.backward(), lambda v: v + 1, float, len, bool, lambda v: v[0]):
            with pytest.raises(rankup.RankupError, match=f"a {kind}, does not have a row per"):
                use(found[key])
        assert "call the network for one task at a time" in repr(found[key])


def test_batch_of_one_task_is_joined_like_any_other() -> None:
    """What can be used depends on the call, not on which tasks its samples happen to have."""
    net = network()
    found = net(X, task=torch.zeros(len(X), dtype=torch.long), more=True)
    with pytest.raises(rankup.RankupError, match="cannot be joined"):
        float(found["loss"])
