"""Reading a LoRA adapter of PEFT as a task of a network. PEFT itself is not needed."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankup.errors import RankupError, StoreError
from rankup.growing.plan import is_substituted, owner_of
from rankup.interop.lora_export import CONFIG, PREFIX, TENSORS, refuse_without_base
from rankup.layers import FactoredLayer, TaskHead, TaskLayer, TaskNorm
from rankup.layers.spec import WeightSpec
from rankup.net.network import IncrementalNet
from rankup.storage.reading import tensors_of
from rankup.utils.files import read_regular

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_OF_PAIR = {"A.weight", "B.weight", "B.bias"}


def from_lora(
    net: IncrementalNet, name: str, folder: str | Path, classes: int | None = None
) -> None:
    """Begin a task that starts from a LoRA adapter. It can be trained further until `commit_task`
    makes it constant.

    The adapter must be of the module that the network was grown from with `base="keep"`. The task
    selects from no other task, so all its factors come from the adapter: the rank rule's `first`
    must be at least the adapter's rank. Statistics of batch norms are computed from the batches
    given to `commit_task(calibrate=…)`.

    Args:
        net: the network.
        name: the new task's name.
        folder: where PEFT's `save_pretrained` wrote the adapter.
        classes: how many classes the task has, if the adapter has no head; its head is then fresh
            and has to be trained.
    """
    refuse_without_base(net)
    adapter, places = _Adapter.read(Path(folder)), _Places.of(net)
    values = [*_of_pairs(adapter, places), *_of_saved(adapter, places)]
    found = _classes(places, adapter, classes)
    if found == 1:
        net.begin_task(name, outputs=1, uses="own")
    else:
        net.begin_task(name, found, uses="own")
    try:
        for layer, key, value in values:
            _set(layer, key, value)
    except BaseException:
        net.abandon_task()
        raise


Values = list[tuple[TaskLayer, str, Tensor]]  # a layer, the name of a tensor, its new value


@dataclass
class _Adapter:
    """The contents of an adapter's folder."""

    config: dict[str, Any]
    pairs: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # by the layer's name
    saved: dict[str, Tensor] = field(default_factory=dict)  # by their names in the module

    @classmethod
    def read(cls, folder: Path) -> "_Adapter":
        try:
            config = json.loads(read_regular(folder / CONFIG))
            content = read_regular(folder / TENSORS, most=1 << 40)
        except OSError as error:
            raise StoreError(f"{folder} is not a folder of a LoRA adapter: {error}") from None
        except ValueError:
            raise StoreError(f"{folder / CONFIG} is not JSON") from None
        kind = config.get("peft_type") if isinstance(config, dict) else None
        if kind != "LORA":
            raise RankupError(f"{folder} holds an adapter of the kind {kind!r}, not 'LORA'")
        adapter = cls(config)
        for full, tensor in tensors_of(folder / TENSORS, content).items():
            key = full.removeprefix(PREFIX)
            layer, is_pair, part = key.partition(".lora_")
            if ".original_module." in key or ".modules_to_save." in key:
                continue  # with bias="all", biases of saved modules once more, before and after
            if not is_pair:
                adapter.saved[key.replace(".base_layer.", ".")] = tensor
            elif part in _OF_PAIR:
                adapter.pairs.setdefault(layer, {})[part] = tensor
            else:
                raise RankupError(
                    f"the adapter has {key!r}: only the pairs of plain LoRA become factors, not "
                    "DoRA or embeddings"
                )
        return adapter

    def scaling(self, layer: str, rank: int) -> float:
        alpha = self.config.get("lora_alpha", 8)
        for pattern, own in (self.config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", layer):
                alpha = own
                break
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


@dataclass
class _Places:
    """Where a network keeps the tensors of the module that it was grown from.

    Attributes:
        factored: layers with factors, by their names in the module.
        own: tensors that each task has whole, by their names in the module: the layer that has them
            and their names there.
        bases: values in the module, by name, of `own` and of all constant tensors.
        heads: names of the heads.
        norms: names of the norms.
    """

    factored: dict[str, FactoredLayer] = field(default_factory=dict)
    own: dict[str, tuple[TaskLayer, str]] = field(default_factory=dict)
    bases: dict[str, Tensor] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)
    norms: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, net: IncrementalNet) -> "_Places":
        found = cls(bases=dict(net.body.state_dict()))
        for layer in net.layers:
            name = layer.spec.name
            if isinstance(layer, FactoredLayer):
                found._add_factored(layer)
            elif isinstance(layer, TaskHead):
                found.heads.append(name)
                found.own |= {f"{name}.{key}": (layer, key) for key in ("weight", "bias")}
            elif isinstance(layer, TaskNorm):
                found.norms.add(owner_of(layer.spec) if is_substituted(layer.spec) else name)
                for key in layer.spec.base_shapes():
                    found._add_own(f"{name}.{key}", layer, key)
            else:
                found._add_own(name, layer, "value")
        return found

    def _add_factored(self, layer: FactoredLayer) -> None:
        spec = layer.spec
        weight = spec.parameter if isinstance(spec, WeightSpec) else f"{spec.name}.weight"
        owner, _, key = weight.rpartition(".")
        is_whole = not isinstance(spec, WeightSpec) or spec.index is None
        if is_whole and key == "weight":
            self.factored[owner] = layer
            base = layer.base()["weight"]
            turned = isinstance(spec, WeightSpec) and spec.transposed
            self.bases[weight] = base.t() if turned else base
        if spec.has_own_bias:
            self._add_own(f"{owner}.bias", layer, "bias")

    def _add_own(self, name: str, layer: TaskLayer, key: str) -> None:
        self.own[name] = layer, key
        self.bases[name] = layer.base()[key]


def _of_pairs(adapter: _Adapter, places: _Places) -> Values:
    values: Values = []
    for name, pair in adapter.pairs.items():
        layer = places.factored.get(name)
        if layer is None:
            raise RankupError(
                f"the adapter adds to layer {name!r}, which has no factors in this network: grow "
                "the module that the adapter was made for, without excluding the layer"
            )
        A, B = _flat(pair, "A.weight", name), _flat(pair, "B.weight", name)
        rank, spec = len(A), layer.spec
        if (A.shape[1], *B.shape) != (spec.inputs, spec.outputs, rank):
            raise RankupError(
                f"the adapter's pair for layer {name!r} is for {len(B)} × {A.shape[1]} weights, "
                f"but the layer has {spec.outputs} × {spec.inputs}"
            )
        if rank > spec.rank.first:
            raise RankupError(
                f"the adapter has rank {rank} in layer {name!r}, but a task of this network adds "
                f"{spec.rank.first} factors: grow it with Rank(first={rank}, …) or more"
            )
        scaling = adapter.scaling(name, rank)
        first = spec.rank.first
        values += [(layer, "U", _padded(B.t() * scaling, first)), (layer, "V", _padded(A, first))]
        if (shift := pair.get("B.bias")) is not None and bool(shift.any()):
            if f"{name}.bias" not in places.own:
                raise RankupError(f"the adapter adds a bias to layer {name!r}, which has none")
            owner, key = places.own[f"{name}.bias"]
            before = adapter.saved.pop(f"{name}.bias", places.bases[f"{name}.bias"])
            values.append((owner, key, before + shift.to(before) * scaling))
    return values


def _flat(pair: Mapping[str, Tensor], key: str, layer: str) -> Tensor:
    if key not in pair:
        raise RankupError(f"the adapter has only one half of the pair for layer {layer!r}")
    return pair[key].flatten(1)


def _of_saved(adapter: _Adapter, places: _Places) -> Values:
    values: Values = []
    for name, tensor in adapter.saved.items():
        owner, _, key = name.rpartition(".")
        if name in places.own:
            values.append((*places.own[name], tensor))
        elif not (owner in places.norms and key in _STATISTICS):
            base = places.bases.get(name)
            alike = base is not None and base.numel() == tensor.numel()
            if base is None or not alike or not torch.equal(base.flatten(), tensor.flatten()):
                raise RankupError(
                    f"the adapter has a {name!r} of its own, of which tasks of this network have "
                    f"no more than factors: grow it with per_task=[{name!r}]"
                )
    return values


def _classes(places: _Places, adapter: _Adapter, given: int | None) -> int:
    rows = {head: adapter.saved.get(f"{head}.weight") for head in places.heads}
    found = {len(weight) for weight in rows.values() if weight is not None}
    if given is not None:
        found.add(given)
    if len(found) > 1:
        raise RankupError(f"the adapter's head has {min(found)} classes, not {max(found)}")
    if not found:
        raise RankupError(
            f"the adapter has no head {places.heads[0]!r} of its own: say how many classes= the "
            "task has, and train its head before the commit"
        )
    return found.pop()


@torch.no_grad()
def _set(layer: TaskLayer, key: str, value: Tensor) -> None:
    parameter = layer.get_parameter(f"new_{key}")
    if value.numel() != parameter.numel():
        raise RankupError(
            f"the adapter's {key} of {layer.spec.name!r} has the shape {list(value.shape)}, but "
            f"that of the network is {list(parameter.shape)}"
        )
    parameter.copy_(value.reshape(parameter.shape))


def _padded(value: Tensor, rows: int) -> Tensor:
    """Factors `[r, n]` with rows of zeros added, `[rows, n]`."""
    return torch.cat([value, value.new_zeros(rows - len(value), *value.shape[1:])])
