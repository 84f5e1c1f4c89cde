"""Networks of custom modules, saved and loaded into another instance."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankup
from helpers.own_modules import Untracked, halves, mlp
from rankup.rank import Rank


def test_loaded_network_answers_and_does_not_drop_out(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    net = rankup.grow(module, Rank(2, 1))
    net.begin_task("a", 2)
    net.commit_task()
    rankup.save(net, tmp_path / "net")
    loaded, x = rankup.load(tmp_path / "net", module=module), halves().test_x
    assert torch.equal(loaded(x, task="a"), net.eval()(x, task="a"))


def test_module_that_holds_no_numbers_is_refused(tmp_path: Path) -> None:
    rankup.save(rankup.grow(Untracked(), Rank(2, 1)), tmp_path / "net")
    with torch.device("meta"):
        module = Untracked()
    with pytest.raises(rankup.StoreError, match="on the device 'meta', which holds no values"):
        rankup.load(tmp_path / "net", module)


def test_same_class_is_no_other_wherever_it_is_defined(tmp_path: Path) -> None:
    class Inside(Untracked):
        pass

    rankup.save(rankup.grow(Inside(), Rank(2, 1)), tmp_path / "net")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rankup.load(tmp_path / "net", Inside())


def test_another_class_of_module_is_pointed_out(tmp_path: Path) -> None:
    net = rankup.grow(Untracked(), Rank(2, 1))
    rankup.save(net, tmp_path / "net")

    class Another(Untracked):
        pass

    with pytest.warns(UserWarning, match=r"from a Untracked, but the module is a .*\.Another"):
        rankup.load(tmp_path / "net", module=Another())


def test_tensors_from_elsewhere_are_saved_as_what_they_are(tmp_path: Path) -> None:
    def taught(seed: int) -> rankup.IncrementalNet:
        net = rankup.grow(mlp(), Rank(2, 1), seed=seed)
        net.begin_task("a", 2)
        net.commit_task()
        return net.eval()

    one, other, x = taught(0), taught(1), halves().test_x
    rankup.save(one, tmp_path / "one")
    one.load_state_dict(other.state_dict())
    with pytest.raises(rankup.RankupError, match="that this network has not learned"):
        rankup.save(one, tmp_path / "one")
    rankup.save(one, tmp_path / "new")
    loaded = rankup.load(tmp_path / "new", module=mlp())
    assert torch.equal(loaded(x, task=0), other(x, task=0))


def test_seeded_factors_of_another_seed_are_not_taken() -> None:
    """No file would hold them: after saving and loading, the network would answer differently."""

    def taught(seed: int) -> rankup.IncrementalNet:
        net = rankup.grow(mlp(), Rank(2, 1, seeded=8), seed=seed)
        net.begin_task("a", 2)
        net.commit_task()
        return net.eval()

    one, same, other = taught(0), taught(0), taught(5)
    same.load_state_dict(one.state_dict())
    with pytest.raises(RuntimeError, match="seeded factors from another seed, .* seed, not 5"):
        other.load_state_dict(one.state_dict())


def transposed() -> nn.Module:
    """A module whose weights are stored column by column, as in other libraries."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    module[0].weight = nn.Parameter(torch.randn(16, 5).t())
    return module


@pytest.mark.parametrize("options", [{"base": "keep"}, {"exclude": "0"}])
def test_weights_that_lie_otherwise_in_memory_keep_their_bits(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    net = rankup.grow(transposed(), Rank(2, 1), **options)
    net.begin_task("a", 2)
    net.commit_task()
    rankup.save(net, tmp_path / "net")
    loaded, x = rankup.load(tmp_path / "net", module=transposed()), torch.randn(33, 16)
    for few in (x, x[:3], x[:1]):
        assert torch.equal(loaded(few, task="a"), net.eval()(few, task="a"))
    assert all(tensor.is_contiguous() for tensor in net.buffers())
