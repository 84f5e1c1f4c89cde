"""What modules ask of their layers: with a network's layers in their place, a forward finds the
same as before, or the module is refused."""

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.utils.checkpoint import checkpoint

import rankup
from rankup.data.tasks import Task
from rankup.layers import active


def committed(
    module: nn.Module, x: Tensor, tasks: int = 1, **options: Any
) -> rankup.IncrementalNet:
    net = rankup.grow(module, rankup.Rank(3, 1), **options)
    for index in range(tasks):
        net.begin_task(f"{index}", 3)
        net.commit_task(calibrate=[x])
    return net.eval()


def task_of(x: Tensor) -> Task:
    y = torch.arange(len(x)) % 3
    return Task("a", 3, x, y, x, y)


class Asking(nn.Module):
    """Runs a ReLU after layers of a certain class."""

    def __init__(self, of: type[nn.Module], norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.of = of
        self.layers = nn.ModuleList([nn.Linear(8, 16), norm(16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, self.of):
                x = F.relu(x)
        answer: Tensor = self.head(x)
        return answer


@pytest.mark.parametrize("of", [nn.Linear, nn.LayerNorm])
def test_a_forward_that_asks_for_a_class_of_torchs_is_refused(of: type[nn.Module]) -> None:
    with pytest.raises(rankup.RankupError, match="takes a different path .* isinstance"):
        rankup.grow(Asking(of), rankup.Rank(3, 1))
    rankup.grow(Asking(nn.Conv2d), rankup.Rank(3, 1))


def test_a_forward_that_asks_only_while_it_trains_is_refused() -> None:
    class Training(Asking):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.training else self.head(self.layers[0](x))

    with pytest.raises(rankup.RankupError, match="takes a different path"):
        rankup.grow(Training(nn.Linear), rankup.Rank(3, 1))


def test_a_forward_that_goes_by_chance_is_not_refused() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            answer: Tensor = self.head(x + self.b(x) if random.random() < 0.5 else x)
            return answer

    for _ in range(8):
        rankup.grow(Dropping(), rankup.Rank(3, 1))


class Marked(nn.Module):
    """Looks at an attribute that it has set on a layer."""

    def __init__(self, name: str = "residual") -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.name = name
        setattr(self.a, name, True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            x = x + layer(x) if getattr(layer, self.name, False) else layer(x)
        answer: Tensor = self.head(x)
        return answer


def test_attributes_of_layers_stay() -> None:
    module, x = Marked(), torch.randn(5, 8)
    net = rankup.grow(module, rankup.Rank(3, 1), base="keep")
    net.begin_task("a", 3)
    seen: list[Tensor] = []
    for head in (module.head, net.body.get_submodule("head")):
        head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    module(x), net(x, task="a")
    assert torch.equal(*seen)
    net.commit_task()
    torch.testing.assert_close(net.merged("a")(x), net(x, task="a"))
    assert net.merged("a").get_submodule("a").residual is True


@pytest.mark.parametrize("name", ["seed", "count", "U"])
def test_attributes_that_layers_have_for_themselves_are_refused(name: str) -> None:
    with pytest.raises(rankup.RankupError, match=f"'a' has an attribute '{name}'"):
        rankup.grow(Marked(name), rankup.Rank(3, 1))


def test_a_class_that_has_more_than_torchs_is_not_plain() -> None:
    class Gaining(nn.Linear):
        gain = 2.0

    class Drawn(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight)

    with pytest.raises(rankup.RankupError, match="a Gaining, which is not a plain Linear"):
        rankup.grow(nn.Sequential(Gaining(8, 8), nn.Linear(8, 3)), rankup.Rank(3, 1))
    rankup.grow(nn.Sequential(Drawn(8, 8), nn.Linear(8, 3)), rankup.Rank(3, 1))


class Sized(nn.Module):
    """Looks at all attributes of a norm, and calls layers with a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.25)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(input=self.conv(input=x)) * self.norm.momentum + self.norm.num_features
        y = y * self.norm.track_running_stats
        answer: Tensor = self.head(input=y.mean((2, 3)))
        return answer


def test_layers_and_folded_norms_say_of_themselves_what_torchs_do() -> None:
    x = torch.randn(6, 3, 5, 5)
    net = committed(Sized(), x)
    assert isinstance(net.merged("0").get_submodule("norm"), nn.Identity)
    torch.testing.assert_close(net.merged("0")(x), net(x, task="0"))


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Any = None, raw: Any = None) -> Tensor:
        y = self.conv(x)
        if raw is None or mask is not None:
            y = self.norm(y)
        y = y if mask is None else y * mask
        answer: Tensor = self.head(y.relu().mean((2, 3)))
        return answer


def test_norms_are_folded_where_they_run_whichever_options_are_given() -> None:
    x = torch.randn(6, 3, 5, 5) + 2
    net = committed(Choosing(), x)
    for options in ({}, {"mask": 2.0}, {"raw": 1}, {"mask": 2.0, "raw": 1}):
        answer = net(x, task="0", **options)
        torch.testing.assert_close(net.merged("0")(x, **options), answer)


class Kind(nn.Module):
    """Looks at the kind of a weight, in ways that need no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.a.weight
        x = self.a(x.type_as(weight).to(weight)) / weight.size(0) + weight.numel()
        answer: Tensor = self.head(x)
        return answer


def test_a_forward_may_look_at_the_kind_of_a_weight() -> None:
    x = torch.randn(6, 8)
    net = committed(Kind(), x, tasks=2)
    mixed = net(x, task=torch.tensor([0, 1] * 3))
    torch.testing.assert_close(mixed[::2], net(x[::2], task=0))
    torch.testing.assert_close(mixed[1::2], net(x[1::2], task=1))


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_a_copy_of_a_compiled_network_runs_itself() -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(6, 8)
    net = rankup.grow(module, rankup.Rank(3, 1))
    net.compile(backend="eager")
    net.begin_task("a", 3)
    net(x, task="a")
    copied = copy.deepcopy(net)
    for parameter in copied.parameters():
        parameter.data.zero_()
    assert not copied(x, task="a").any()
    assert net(x, task="a").any()


@pytest.mark.parametrize("inside", [True, False])
def test_compiled_modules_are_refused(inside: bool) -> None:
    block: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    if inside:
        module: Any = nn.Sequential(torch.compile(block, backend="eager"), nn.Linear(8, 3))
    else:
        module = torch.compile(nn.Sequential(block, nn.Linear(8, 3)), backend="eager")
    with pytest.raises(rankup.RankupError, match=r"compiled with torch.compile.*\._orig_mod"):
        rankup.grow(module, rankup.Rank(3, 1))


def test_layers_refuse_tasks_that_they_do_not_know() -> None:
    x = torch.randn(4, 8)
    net = committed(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), x, tasks=2)
    for unknown in (-1, 2, 3):
        with active(unknown), pytest.raises(rankup.TaskStateError, match=f"0 to 1, not {unknown}"):
            net.body(x)
    with active(torch.tensor(1)):
        assert torch.equal(net.body(x), net(x, task=1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own
def test_derivatives_in_forward_mode_are_those_in_reverse() -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(6, 8)
    net = rankup.grow(module, rankup.Rank(3, 1))
    net.begin_task("a", 3)
    forward: Any = jacobian(lambda v: net(v, task="a"), x, strategy="forward-mode", vectorize=True)
    reverse: Any = jacobian(lambda v: net(v, task="a"), x)
    torch.testing.assert_close(forward, reverse)
    with forward_ad.dual_level():
        answer = net(forward_ad.make_dual(x, torch.ones_like(x)), task="a")
        tangent = forward_ad.unpack_dual(answer).tangent
    torch.testing.assert_close(tangent, reverse.sum((2, 3)))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Any = checkpoint(self.block, x.clone().requires_grad_(), use_reentrant=True)
        answer: Tensor = self.head(y)
        return answer


def test_fit_refuses_checkpoints_that_no_gradient_comes_past() -> None:
    net = rankup.grow(Checkpointed(), rankup.Rank(3, 1), head="head")
    with pytest.raises(rankup.RankupError, match="use_reentrant=True"):
        rankup.fit(net, task_of(torch.randn(12, 8)))
    assert net.learning is None


def test_fit_refuses_a_forward_that_wants_more_than_inputs() -> None:
    class Wanting(nn.Sequential):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            answer: Tensor = super().forward(x * mask)
            return answer

    net = rankup.grow(Wanting(nn.Linear(8, 8), nn.Linear(8, 3)), rankup.Rank(3, 1))
    with pytest.raises(rankup.RankupError, match="missing a required argument: 'mask'; begin_task"):
        rankup.fit(net, task_of(torch.randn(12, 8)))
