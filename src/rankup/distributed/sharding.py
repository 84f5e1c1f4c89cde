"""A kept base divided among ranks: each holds a part of every large weight, and the whole weight
only while its layer runs, forward or backward.

Torch's `fully_shard` divides parameters, but the weights of a base are constant buffers. Here they
become DTensors, which hooks gather. What is trained is small and stays whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankup.errors import RankupError

KEY = "base_weight"


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself or, if it is divided among ranks, all of it. All ranks must call this
    together."""
    gather = getattr(tensor, "full_tensor", None)
    full: Tensor = tensor if gather is None else gather()
    return full


def shard(layers: Iterable[nn.Module]) -> None:
    """Divide the kept weights of these layers among all ranks, by rows."""
    from torch.distributed import get_world_size
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    layers = [layer for layer in layers if layer._buffers.get(KEY) is not None]
    if not layers:
        return
    mesh = init_device_mesh(layers[0].get_buffer(KEY).device.type, (get_world_size(),))
    for layer in layers:
        if is_sharded(layer):
            continue
        weight = layer.get_buffer(KEY)
        layer._buffers[KEY] = distribute_tensor(weight, mesh, [Shard(0)])
        layer.may_merge = False  # type: ignore[assignment]  # no process holds a whole weight
        # One object for both hooks, because it keeps the rank's part in between.
        gathered = _Gathered()
        layer.register_forward_pre_hook(gathered.begin)
        layer.register_forward_hook(gathered.end, always_call=True)


def refuse_fully_sharded(network: type) -> None:
    """Raise if torch's `fully_shard`, which replaces a network's class, was applied to it."""
    if any(base.__name__ == "FSDPModule" for base in network.__mro__):
        raise RankupError(
            "fully_shard divides parameters, but a kept base has none and every task has new ones: "
            "grow the module again, and divide its base with net.distribute(shard=True)"
        )


def is_sharded(layer: nn.Module) -> bool:
    return hasattr(layer._buffers.get(KEY), "full_tensor")


@contextmanager
def unsharded(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, every rank has all weights, to save them or to copy the network."""
    parts = {layer: layer.get_buffer(KEY) for layer in layers if is_sharded(layer)}
    for layer, part in parts.items():
        layer._buffers[KEY] = whole(part)
    try:
        yield
    finally:
        for layer, part in parts.items():
            layer._buffers[KEY] = part


class _Gathered:
    """Gathers a layer's weight for its forward pass, and again for its backward pass instead of
    keeping it until then."""

    def __init__(self) -> None:
        self._part: Tensor | None = None
        self._hooks: Any = None

    def begin(self, layer: nn.Module, _: Any) -> None:
        if not is_sharded(layer):  # inside of `unsharded`
            return
        self._part = part = layer.get_buffer(KEY)
        layer._buffers[KEY] = full = whole(part)
        memory = full.untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() != memory:
                return tensor
            return part, tensor.size(), tensor.stride(), tensor.storage_offset()

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, _unpack)
        self._hooks.__enter__()

    def end(self, layer: nn.Module, _: Any, output: Any) -> None:
        if self._part is not None:
            self._hooks.__exit__(None, None, None)
            layer._buffers[KEY], self._part, self._hooks = self._part, None, None


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    part, *view = packed
    return whole(part).as_strided(*view)
