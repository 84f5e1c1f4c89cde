"""The dtypes of a network: of its module's layers, of what tasks learn, and of what is kept."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import nn

from rankup.errors import RankupError
from rankup.growing.options import GrowOptions
from rankup.growing.plan import is_substituted, owner_of
from rankup.layers import name_of
from rankup.layers.spec import Dtypes, FactoredSpec, LayerSpec


@dataclass(frozen=True)
class NetworkDtypes:
    """What a network computes in, tasks learn, and factored layers keep (None: as it was)."""

    network: torch.dtype
    learns: torch.dtype
    keeps: torch.dtype | None


def choose_dtypes(module: nn.Module, options: GrowOptions) -> NetworkDtypes:
    numbers = Counter[torch.dtype]()
    for weight in module.parameters():
        numbers[weight.dtype] += weight.numel()
    for dtype in numbers:
        if not dtype.is_floating_point:
            raise RankupError(f"the module's weights must be real numbers, got {dtype}")
    widest = reduce(torch.promote_types, numbers)
    learns = widest if options.dtype is None else getattr(torch, options.dtype)
    keeps = None if options.base_dtype is None else getattr(torch, options.base_dtype)
    if torch.promote_types(learns, widest) != learns:
        raise RankupError(f"dtype={learns} cannot hold the numbers of a module in {widest}")
    if keeps is not None and torch.promote_types(keeps, widest) != widest:
        raise RankupError(f"base_dtype={keeps} is no less than the module's own, {widest}")
    if options.base == "new" and {*numbers} != {learns}:
        raise RankupError(
            f"tasks would learn in {learns} beside weights in {_listed(numbers, learns)} that "
            "the first one trains: with base='new' the module must be in one dtype, that of tasks"
        )
    if options.store != "full" and learns not in (torch.float32, torch.float64):
        raise RankupError(
            f"store={options.store!r} is for modules in float32 or float64, but this one is in "
            f"{name_of(learns)}"
        )
    return NetworkDtypes(numbers.most_common(1)[0][0], learns, keeps)


def with_dtypes(
    spec: LayerSpec, modules: Mapping[str, nn.Module], dtypes: NetworkDtypes
) -> LayerSpec:
    """A part that says its dtypes, if they are not all the network's."""
    own = _own_dtype(spec, modules) or dtypes.network
    keeps = dtypes.keeps if isinstance(spec, FactoredSpec) and dtypes.keeps else own
    found = (own, dtypes.learns, keeps)
    if {*found} == {dtypes.network}:
        return spec
    return replace(spec, dtypes=Dtypes(*map(name_of, found)))


def _own_dtype(spec: LayerSpec, modules: Mapping[str, nn.Module]) -> torch.dtype | None:
    """What the layer that a part is of computes in."""
    if is_substituted(spec):
        name = getattr(spec, "parameter", spec.name)
        tensor = getattr(modules[owner_of(spec)], name.rpartition(".")[2], None)
        if isinstance(tensor, torch.Tensor):
            return tensor.dtype
    owner = modules[owner_of(spec) if is_substituted(spec) else spec.name]
    return next((tensor.dtype for tensor in owner.parameters(recurse=False)), None)


def _listed(numbers: Mapping[torch.dtype, int], learns: torch.dtype) -> str:
    return ", ".join(sorted(str(dtype) for dtype in numbers if dtype != learns))
