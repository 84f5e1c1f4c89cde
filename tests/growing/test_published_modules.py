"""Forwards that do more than run layers, as published modules do."""

import copy
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.utils.checkpoint import checkpoint

import rankup
from helpers.own_modules import halves
from helpers.zoo import relative_error, teach
from rankup.layers import active
from rankup.rank import Rank


def with_two_tasks(module: nn.Module) -> rankup.IncrementalNet:
    net = rankup.grow(module, Rank(2, 1), head="head")
    for name in ("a", "b"):
        net.begin_task(name, 3)
        net.commit_task()
    return net.eval()


class Casting(nn.Module):
    """Looks at the dtype, device and shape of weights, and if told to at their values."""

    def __init__(self, traceable: bool = True, reads: bool = False) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.LayerNorm(4)
        self.mid, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.traceable, self.reads = traceable, reads

    def forward(self, x: Tensor) -> Tensor:
        if not self.traceable and x.sum() > 1e9:
            x = x * 0
        x = x.to(self.conv.weight.device, self.conv.weight.dtype)
        x = self.norm(self.conv(x).relu().mean((2, 3)).type_as(self.norm.weight))
        x = self.mid(x.to(self.mid.weight).view(-1, self.mid.weight.shape[1]))
        if self.reads:
            x = x + self.mid.weight.sum()
        return self.head(x.to(self.head.bias.dtype).relu())


@pytest.mark.parametrize("traceable", [False, True])
def test_forward_may_look_at_dtype_device_and_shape_of_weights(traceable: bool) -> None:
    net, x = with_two_tasks(Casting(traceable)), torch.randn(6, 1, 6, 6)
    torch.testing.assert_close(net.merged("a")(x), net(x, task="a"))
    tasks = torch.arange(6) % 2
    alone = torch.stack([net(x, task=name) for name in ("a", "b")])
    torch.testing.assert_close(net(x, task=tasks), alone[tasks, torch.arange(6)])
    net.begin_task("c", 3)
    net(x, task="c").sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_mixed_batch_refuses_to_read_values_of_weights() -> None:
    net = with_two_tasks(Casting(traceable=False, reads=True))
    with pytest.raises(rankup.RankupError, match="layer 'mid' has a weight for each task"):
        net(torch.randn(2, 1, 6, 6), task=torch.tensor([0, 1]))


@pytest.mark.parametrize("name", ["conv", "mid"])
def test_weight_of_layer_is_that_of_active_task(name: str) -> None:
    net = with_two_tasks(Casting())
    layer = net.body.get_submodule(name)
    for task in (0, 1):
        with active(task):
            assert torch.equal(layer.weight, net.merged(task).get_submodule(name).weight)
    with pytest.raises(rankup.TaskStateError, match="has a weight for each task"):
        _ = layer.weight


class Block(nn.Module):
    """As in torchvision's ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            self.downsample = nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7, 2, padding=3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1, self.layer2 = Block(4, 4, 1), Block(4, 8, 2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(8, 3)
        for module in self.modules():
            if isinstance(module, Block):
                nn.init.constant_(module.bn2.weight, 0)

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_impl(x)


def test_resnet_of_torchvision_is_grown_and_all_norms_are_folded() -> None:
    net, x = rankup.grow(ResNet().double(), Rank(2, 1)), torch.randn(6, 3, 24, 24).double()
    assert [spec.name for spec in net.plan.layers][-1] == "fc"
    assert len(net.plan.folds) == 6
    teach(net, "a", x)
    plain = net.eval().merged("a", fold=True)
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in plain.modules())
    assert relative_error(plain(x), net(x, task="a")) < 1e-10


class Sized(nn.Module):
    """Looks at attributes of a norm, and calls layers with a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.25)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(input=self.conv(input=x)) * self.norm.momentum + self.norm.num_features
        y = y * self.norm.track_running_stats
        return self.head(input=y.mean((2, 3)))


def test_task_layers_and_folded_norms_have_the_attributes_of_torchs() -> None:
    net, x = rankup.grow(Sized(), Rank(2, 1)), torch.randn(6, 3, 5, 5)
    teach(net, "a", x)
    plain = net.eval().merged("a", fold=True)
    assert isinstance(plain.norm, nn.Identity)
    torch.testing.assert_close(plain(x), net(x, task="a"))


class Checkpointed(nn.Module):
    """Recomputes its block in the backward pass, if told to."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.head, self.again = nn.Linear(8, 3), again

    def forward(self, x: Tensor) -> Tensor:
        if not self.again:
            return self.head(self.block(x))
        task = rankup.layers.active_task()
        contexts = lambda: (nullcontext(), active(task))  # noqa: E731
        return self.head(checkpoint(self.block, x, use_reentrant=False, context_fn=contexts))


def test_checkpointed_block_is_recomputed_for_its_task_in_any_thread() -> None:
    x, gradients = torch.randn(6, 12), []
    Checkpointed(again=True)(x).sum().backward()  # the module alone can do that, too
    for again in (False, True):
        net = rankup.grow(Checkpointed(again), Rank(2, 1), head="head")
        net.begin_task("a", 3)
        loss = net(x, task="a").square().sum()
        thread = threading.Thread(target=loss.backward)  # as autograd has for a GPU
        thread.start()
        thread.join()
        gradients.append([parameter.grad for parameter in net.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


class Reentrant(Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return self.head(checkpoint(self.block, x, use_reentrant=True))


def test_fit_refuses_checkpoints_that_no_gradient_passes() -> None:
    net = rankup.grow(Reentrant(again=True), Rank(2, 1), head="head")
    with pytest.raises(rankup.RankupError, match="use_reentrant=True"):
        rankup.fit(net, halves())
    assert net.learning is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own
def test_derivatives_in_forward_mode_are_those_in_reverse() -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(6, 8)
    net = rankup.grow(module, Rank(2, 1))
    net.begin_task("a", 3)
    forward = jacobian(lambda v: net(v, task="a"), x, strategy="forward-mode", vectorize=True)
    reverse = jacobian(lambda v: net(v, task="a"), x)
    torch.testing.assert_close(forward, reverse)
    with forward_ad.dual_level():
        answer = net(forward_ad.make_dual(x, torch.ones_like(x)), task="a")
        tangent = forward_ad.unpack_dual(answer).tangent
    torch.testing.assert_close(tangent, reverse.sum((2, 3)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_copy_of_compiled_network_runs_itself() -> None:
    net, x = rankup.grow(rankup.models.mlp(9, hidden=[8]), Rank(2, 1)), torch.randn(6, 9)
    net.compile(backend="eager")
    net.begin_task("a", 3)
    net(x, task="a")
    copied = copy.deepcopy(net)
    for parameter in copied.parameters():
        parameter.data.zero_()
    assert not copied(x, task="a").any()
    assert net(x, task="a").any()


def test_task_layers_refuse_unknown_tasks() -> None:
    net, x = with_two_tasks(rankup.models.mlp(9, hidden=[8])), torch.randn(4, 9)
    for unknown in (-1, 2):
        with active(unknown), pytest.raises(rankup.TaskStateError, match=f"0 to 1, not {unknown}"):
            net.body(x)
    with active(torch.tensor(1)):
        assert torch.equal(net.body(x), net(x, task=1))
