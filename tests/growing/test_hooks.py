"""Hooks on modules and layers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.own_modules import RECIPE, halves, mlp, right
from helpers.zoo import teach
from rankup.rank import Rank


def turned(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].flip(1),)


@pytest.mark.parametrize("given", [True, False])
def test_hooks_run_in_every_step(given: bool) -> None:
    """Whether on the given module or on the network's own. What was learned without it would be
    wrong with it."""
    module = mlp()
    if given:
        module.register_forward_pre_hook(turned)
    net = rankup.grow(module, Rank(2, 1))
    if not given:
        net.body.register_forward_pre_hook(turned)
    for _ in range(2):  # the second has frozen factors, whose outputs can be computed once
        task = halves()
        rankup.fit(net, replace(task, name=f"{len(net.tasks)}"), RECIPE)
        assert right(net, task, len(net.tasks) - 1) > 0.9


def test_hooks_of_network_are_refused() -> None:
    """Steps call the module inside: what was learned would be wrong with them."""
    net = rankup.grow(mlp(), Rank(2, 1))
    hook = net.register_forward_pre_hook(turned)
    with pytest.raises(rankup.RankupError, match=r"bypass the network's hooks: .* on net\.body"):
        rankup.fit(net, halves(), RECIPE)
    assert net.learning is None
    hook.remove()
    assert rankup.fit(net, halves(), RECIPE).tasks == [halves().name]


def test_backward_hooks_run_in_every_step() -> None:
    seen: list[int] = []
    net = rankup.grow(mlp(), Rank(2, 1))
    net.body[2].register_full_backward_hook(lambda *_: seen.append(1))
    rankup.fit(net, halves(), RECIPE)
    assert len(seen) == RECIPE.epochs * 7  # steps


def test_merged_module_has_hooks_of_layers() -> None:
    net = rankup.grow(mlp(), Rank(2, 1))
    net.body[0].register_forward_hook(lambda module, inputs, y: 2 * y)
    net.body[2].register_forward_pre_hook(
        lambda module, inputs, options: ((inputs[0] + 1,), options), with_kwargs=True
    )
    rankup.fit(net, halves(), RECIPE)
    x = halves().test_x
    torch.testing.assert_close(net.merged(0, fold=True)(x), net.eval()(x, 0))


def test_norm_is_not_folded_past_a_hook() -> None:
    net = rankup.grow(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)),
        Rank(2, 1),
    )
    x = torch.randn(8, 1, 6, 6)
    teach(net, "a", x)
    assert isinstance(net.merged(0, fold=True)[1], nn.Identity)
    net.body[0].register_forward_hook(lambda conv, inputs, y: y.relu())
    torch.testing.assert_close(net.merged(0, fold=True)(x), net.eval()(x, 0))
