"""A network's routers on disk: the tensors that they keep of a task are in the task's file, and
sums over all tasks are in one file, which every commit replaces by one of another name."""

import math
from pathlib import Path

import safetensors.torch
import torch

from rankup.errors import StoreError
from rankup.growing.routing import RouterRule
from rankup.layers import Tensors
from rankup.net.network import IncrementalNet
from rankup.net.routers.routing import Routing, TaskRow
from rankup.net.routers.sums import WHOLE, Sums
from rankup.storage.manifest import File

_START = "router/"  # of the names of a router's tensors; no module's tensor has a slash in its name
_GRAM = "gram"


def row_tensors(net: IncrementalNet, task: int) -> Tensors:
    """The tensors that routers keep of a task, by their names in its file."""
    if net.routing is None:
        return {}
    return {_START + key: tensor for key, tensor in net.routing.rows[task].tensors.items()}


def taken_row(
    path: Path, tensors: Tensors, rule: RouterRule | None, name: str, classes: int
) -> TaskRow | None:
    """Take the routers' tensors out of those of a task's file, and check them.

    Args:
        path: for errors.
        tensors: of the file, from which the routers' are removed.
        rule: the network's router; without one size is no row.
        name: of the task.
        classes: that the task has.
    """
    if rule is None:
        return None
    own: Tensors = {}
    for key, (kinds, shape) in Routing(rule, 0).layouts(classes).items():
        if (tensor := tensors.pop(_START + key, None)) is None:
            raise StoreError(f"{path} has no tensor {_START + key!r}")
        fits = len(tensor.shape) == len(shape) and all(
            wanted in (None, size) for size, wanted in zip(tensor.shape, shape, strict=True)
        )
        if tensor.dtype not in kinds or not fits:
            raise StoreError(
                f"{path}: {_START + key!r} is {tensor.dtype} of shape {list(tensor.shape)}, which "
                "its router does not store"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise StoreError(f"{path}: {_START + key!r} has numbers that are not finite")
        own[key] = tensor
    return TaskRow(name, classes, own)


def sums_bytes(net: IncrementalNet) -> tuple[bytes, int] | None:
    """The content of the file of sums over all tasks, and the number of samples in them; None
    without sums."""
    routing = net.routing
    if routing is None or not routing.has_sums or routing.total is None:
        return None
    content = safetensors.torch.save({_GRAM: routing.total.packed().contiguous()})
    return content, routing.total.count


def sums_file(content: bytes) -> File:
    """Describe the file of sums. It is named after its content, so that writing a new one never
    touches the one that the manifest names."""
    whole = File.of("", content)
    return File(f"sums-{whole.sha256[:8]}.safetensors", whole.size, whole.sha256)


def sums_of(path: Path, tensors: Tensors, samples: int) -> Sums:
    """The sums in the tensors of their file, checked."""
    gram = tensors.get(_GRAM)
    if {*tensors} != {_GRAM} or gram is None or gram.dim() != 1 or gram.dtype not in WHOLE:
        raise StoreError(f"{path} does not hold a router's sums")
    if math.isqrt(8 * len(gram) + 1) ** 2 != 8 * len(gram) + 1 or not len(gram):
        raise StoreError(f"{path}: {len(gram)} numbers are not half of a matrix")
    return Sums.unpacked(gram.to(torch.int64), samples)
