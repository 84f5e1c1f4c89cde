"""Mixed batches run once through modules that run their own forward, if all that they have are
vectors which scale and shift what they compute."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankup
from helpers.zoo import relative_error
from rankup.layers import RowsError, active
from rankup.layers.affine import affine_in
from rankup.layers.substitute import reads_one_task
from rankup.rank import Rank

WIDTH = 8


class OwnLayerNorm(nn.LayerNorm):
    """As timm writes its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class LayerNorm2d(nn.LayerNorm):
    """As in ConvNeXt: over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x.permute(0, 2, 3, 1), (WIDTH,), self.weight, self.bias, self.eps)
        return y.permute(0, 3, 1, 2)


class LlamaNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(hidden_states.dtype)


class GemmaNorm(LlamaNorm):
    """Its weight starts at zero."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        y = hidden_states * torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + 1e-6)
        return y * (1 + self.weight)


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("offset", nn.Parameter(torch.zeros(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


class NormAct(OwnLayerNorm):
    """With an activation after it, which no scaling and shifting comes after."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class ByRank(OwnLayerNorm):
    """Uses its vectors in another way for longer inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.dim() < 4 else super().forward(x) * self.weight


class Net(nn.Module):
    def __init__(self, norm: nn.Module, images: bool) -> None:
        super().__init__()
        self.into: nn.Module = nn.Conv2d(3, WIDTH, 3) if images else nn.Linear(5, WIDTH)
        self.norm, self.images = norm, images
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.into(x)).tanh()
        return self.head(y.flatten(2).mean(2) if self.images else y.mean(1))  # type: ignore[no-any-return]


NORMS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "a layer norm of timm": (lambda: OwnLayerNorm(WIDTH), False),
    "a layer norm over channels": (lambda: LayerNorm2d(WIDTH), True),
    "an RMS norm of Llama": (LlamaNorm, False),
    "an RMS norm of Gemma": (GemmaNorm, False),
    "a layer scale": (LayerScale, False),
    "a shift": (Shift, False),
}


def taught(norm: nn.Module, images: bool) -> rankup.IncrementalNet:
    torch.manual_seed(0)
    net = rankup.grow(Net(norm, images), Rank(2, 1), base="keep")
    for name in "abc":
        net.begin_task(name, 3)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter))
        net.commit_task()
    return net.eval()


def inputs(images: bool, samples: int = 6) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn((samples, 3, 5, 5) if images else (samples, 4, 5), generator=draw)


@pytest.mark.parametrize(("make", "images"), NORMS.values(), ids=NORMS)
def test_mixed_batch_runs_once(make: Callable[[], nn.Module], images: bool) -> None:
    net, x, ids = taught(make(), images), inputs(images), torch.tensor([2, 0, 1, 1, 0, 2])
    runs: list[int] = []
    net.body.get_submodule("head").register_forward_hook(lambda *_: runs.append(1))
    net(x, task=ids)  # is tried first
    runs.clear()
    mixed = net(x, task=ids)
    assert len(runs) == 1
    alone = torch.cat([net(x[i : i + 1], task=int(task)) for i, task in enumerate(ids)])
    assert relative_error(mixed, alone) < 1e-5


@pytest.mark.parametrize("norm", [NormAct(WIDTH), ByRank(WIDTH)], ids=["activation", "rank"])
def test_other_modules_run_task_after_task(norm: nn.Module) -> None:
    net, x, ids = taught(norm, False), inputs(False), torch.tensor([2, 0, 1, 1, 0, 2])
    assert reads_one_task(net.body)
    alone = torch.cat([net(x[i : i + 1], task=int(task)) for i, task in enumerate(ids)])
    assert relative_error(net(x, task=ids), alone) < 1e-5


def test_trial_leaves_module_as_it_was() -> None:
    norm = OwnLayerNorm(WIDTH)
    with torch.no_grad():
        norm.weight.normal_()
    before, calls = norm.weight.clone(), []
    norm.register_forward_hook(lambda *_: calls.append(1))
    assert affine_in(norm, ["weight", "bias"]) is not None
    assert torch.equal(norm.weight, before)
    assert norm.training
    assert not calls


def test_rows_are_compared_with_samples() -> None:
    net = taught(OwnLayerNorm(WIDTH), False)
    with active(torch.tensor([0, 1])), pytest.raises(RowsError, match="3 rows for a mixed batch"):
        net.body.get_submodule("norm")(torch.randn(3, 4, WIDTH))
