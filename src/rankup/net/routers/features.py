"""Features that do not depend on any task: those of a kept base, or seeded random ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup import seeds
from rankup.errors import RankupError
from rankup.layers import TaskNorm
from rankup.utils.per_thread import PerThread, set_to

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet

STEPS = 127  # of a byte, on each side of zero
_PER_UNIT = 32  # steps; features of inputs of unit variance lie within ±4
_KERNEL = 7  # pixels each way that a random filter sees
_GRID = 5  # places each way over which its answers are averaged
_SMALLEST = 16  # pixels each way of what is seen as an image


def represented(net: IncrementalNet, x: Tensor, options: dict[str, Any]) -> Tensor:
    """Inputs as routers compare them: with a kept base, the base's features normalised to unit
    variance, `[B, in]`; otherwise the inputs themselves."""
    if net.options.base == "keep":
        features = base_features(net, x, options).float()
        return F.layer_norm(features, features.shape[1:])
    if not x.is_floating_point():
        raise RankupError(
            f"this router compares inputs, which are {x.dtype} indices here: grow the network with "
            "base='keep' to compare a base's features, or with router='energy'"
        )
    return x.float()


def seeded_features(rows: Tensor, count: int, seed: int, with_inputs: bool) -> Tensor:
    """`[B, D]`: about `count` seeded random features of inputs, rounded to whole numbers from −127
    to 127, so that their sums are exact in any order.

    Args:
        with_inputs: whether the inputs themselves come before them, as further features.
    """
    images = rows.dim() == 4 and min(rows.shape[-2:]) >= _SMALLEST
    flat = F.layer_norm(rows, rows.shape[1:])
    found = _of_images(flat, count, seed) if images else _of_vectors(flat.flatten(1), count, seed)
    if with_inputs:
        found = torch.cat([flat.flatten(1), found], 1)
    return (found * _PER_UNIT).round().clamp(-STEPS, STEPS)


def _of_vectors(x: Tensor, count: int, seed: int) -> Tensor:
    signs = seeds.signs(seed, "router", "V", count, x.shape[1], torch.float32)
    return F.relu(x @ signs.to(x.device).t())


def _of_images(x: Tensor, count: int, seed: int) -> Tensor:
    """The outputs of random filters, averaged over a grid, `[B, filters·grid²]`."""
    channels = x.shape[1]
    filters = max(1, round(count / _GRID**2))
    length = channels * _KERNEL**2
    signs = seeds.signs(seed, "router", "V", filters, length, torch.float32)
    signs = (signs - signs.mean(1, keepdim=True)).view(filters, channels, _KERNEL, _KERNEL)
    found = F.relu(F.conv2d(x, signs.to(x.device), padding=_KERNEL // 2))
    return F.adaptive_avg_pool2d(found, _GRID).flatten(1)


class _Tap(nn.Module):
    """Takes a head's place and records the inputs of the head."""

    seen = PerThread[list[Tensor]]()

    def forward(self, x: Tensor) -> Tensor:
        if (noted := self.seen.value) is not None:
            noted.append(x)
        return x


_BASES: WeakKeyDictionary[IncrementalNet, tuple[torch.device, nn.Module]] = WeakKeyDictionary()


@torch.no_grad()
def base_features(net: IncrementalNet, x: Tensor, options: dict[str, Any]) -> Tensor:
    """`[B, in]`: the inputs that a head would get from the kept base alone, without any task."""
    device, base = _BASES.get(net, (None, None))
    if base is None or device != net.device:
        base = _base_of(net)
        _BASES[net] = net.device, base
    noted: list[Tensor] = []
    with set_to(_Tap.seen, noted):
        base(x, **options)
    return pooled(noted[-1])


def pooled(features: Tensor) -> Tensor:
    """A head's inputs, `[B, …, in]`, averaged over positions, `[B, in]`."""
    return features if features.dim() == 2 else features.flatten(1, -2).mean(1)


def _base_of(net: IncrementalNet) -> nn.Module:
    """The module that the network was grown from, with its own weights, which are not copied."""
    for layer in net.layers:
        if isinstance(layer, TaskNorm) and layer.spec.is_batch:
            raise RankupError(
                f"a base's features need its own statistics, which the batch norm "
                f"{layer.spec.name!r} keeps for each task: use router='energy'"
            )
    module = net.merged(0)
    named = dict(module.named_parameters(remove_duplicate=False))
    for layer in net.layers:
        for key, tensor in layer.base().items():
            name = f"{layer.spec.name}.{key}"
            place = named[name if name in named else layer.spec.name]
            place.data = tensor.view(place.shape)
    for spec in net.plan.layers:
        if spec.kind == "head":
            owner, _, key = spec.name.rpartition(".")
            setattr(module.get_submodule(owner), key, _Tap())
    return module.eval()
