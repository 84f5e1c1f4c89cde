"""`vectors="shared"`: tasks have a kept module's norms and biases and store none of their own."""

import pytest
import torch
from torch import nn

import rankup
from rankup.growing.options import GrowOptions


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(12, 16), norm, nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(x)).relu())


def grown(norm: nn.Module | None = None, **options: object) -> rankup.IncrementalNet:
    torch.manual_seed(0)
    module = Block(norm or nn.LayerNorm(16))
    return rankup.grow(module, rankup.Rank(first=2, step=1), base="keep", **options)


def learn(net: rankup.IncrementalNet, name: str, seed: int = 0) -> None:
    net.begin_task(name, classes=3)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.5)
    x = torch.randn(32, 12, generator=torch.Generator().manual_seed(seed))
    nn.functional.cross_entropy(net(x, task=name), torch.arange(32) % 3).backward()
    optimiser.step()
    net.commit_task(calibrate=[x])


def test_learns_neither_biases_nor_norms():
    net = grown(vectors="shared")
    net.begin_task("a", classes=3)
    kinds = {kind for kind, of_it in net.parameters_by_kind().items() if of_it}
    assert kinds == {"heads", "factors", "selectors"}


def test_stores_nothing_of_them_for_a_task():
    shared, own = grown(vectors="shared"), grown()
    for net in (shared, own):
        learn(net, "a")
    assert own.size(task="a").biases == 16
    assert own.size(task="a").norms == 32
    assert shared.size(task="a").biases == shared.size(task="a").norms == 0
    assert own.size(task="a").total - shared.size(task="a").total == 48


def test_answers_agree_in_all_forms_and_after_loading(tmp_path):
    net = grown(vectors="shared")
    learn(net, "a")
    learn(net, "b", seed=1)
    x = torch.randn(6, 12)
    answers = [net(x, task="a"), net(x, task="b")]
    mixed = net(x, task=torch.tensor([0, 1, 0, 1, 0, 1]))
    torch.testing.assert_close(mixed[::2], answers[0][::2])
    torch.testing.assert_close(mixed[1::2], answers[1][1::2])
    torch.testing.assert_close(net.merged("a")(x), answers[0])
    rankup.save(net, tmp_path / "net")
    loaded = rankup.load(tmp_path / "net", Block(nn.LayerNorm(16)))
    assert torch.equal(loaded(x, task="b"), answers[1])
    net.remove_task("b")
    assert torch.equal(net(x, task="a"), answers[0])


def test_starts_as_the_module_that_was_given():
    net = grown(vectors="shared")
    nn.init.normal_(net.get_submodule("body.inner").base_bias)
    net.begin_task("a", classes=3)
    inner = net.get_submodule("body.inner")
    x = torch.randn(4, 12)
    with rankup.layers.active(0):
        wanted = nn.functional.linear(x, inner.base_weight, inner.base_bias)
        torch.testing.assert_close(inner(x), wanted)


def trained_norm() -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(16)
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var)
    return norm


def test_batch_norms_keep_the_modules_statistics(tmp_path):
    norm = trained_norm()
    net = grown(norm, vectors="shared")
    learn(net, "a")
    learn(net, "b", seed=1)
    assert net.size(task="a").norms == 0
    kept = net.get_submodule("body.norm")
    assert torch.equal(kept.running_mean, norm.running_mean)
    x = torch.randn(4, 12)
    one = torch.cat([net(sample[None], task="b") for sample in x])
    torch.testing.assert_close(net.train()(x, task="b"), one)  # no answer looks at its batch
    mixed = net(x, task=torch.tensor([1, 0, 1, 0]))
    torch.testing.assert_close(mixed[::2], one[::2])
    rankup.save(net, tmp_path / "net")
    assert torch.equal(rankup.load(tmp_path / "net", Block(trained_norm()))(x, "b"), net(x, "b"))


def test_batch_norms_without_statistics_stay_each_tasks_own():
    net = grown(nn.BatchNorm1d(16, track_running_stats=False), vectors="shared")
    learn(net, "a")
    assert net.size(task="a").norms == 64


def test_batch_norms_stay_each_tasks_own_in_networks_that_were_saved_so(tmp_path):
    module = Block(trained_norm())
    options = GrowOptions(rankup.Rank(2, 1), base="keep", vectors="shared", batch_norms="per task")
    net = rankup.IncrementalNet(module, options)
    learn(net, "a")
    assert net.size(task="a").norms == 64
    rankup.save(net, tmp_path / "net")
    assert "batch_norms" not in (tmp_path / "net" / "manifest.json").read_text()
    loaded = rankup.load(tmp_path / "net", Block(trained_norm()))
    x = torch.randn(4, 12)
    assert torch.equal(loaded(x, task="a"), net(x, task="a"))


def test_needs_a_kept_base():
    with pytest.raises(rankup.RankupError, match="needs base='keep'"):
        rankup.grow(Block(nn.LayerNorm(16)), rankup.Rank(1, 1), vectors="shared")
    with pytest.raises(rankup.RankupError, match="'per task' or 'shared', got 'own'"):
        grown(vectors="own")
