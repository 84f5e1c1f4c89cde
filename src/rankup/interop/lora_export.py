"""Writing a task as a LoRA adapter, in a folder that PEFT loads. PEFT itself is not needed."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from rankup.errors import RankupError, StoreError
from rankup.growing.names import folded
from rankup.growing.plan import is_substituted, owner_of
from rankup.layers import CONVOLUTIONS, FactoredLayer, TaskHead, TaskLayer, TaskNorm
from rankup.net.network import IncrementalNet
from rankup.storage.atomic import make_folder, write_file, write_json

PREFIX = "base_model.model."  # of the names of all tensors in an adapter
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


@dataclass
class Pair:
    """What an adapter adds to one layer: `B A` to its weight, and `shift` to its bias."""

    A: Tensor  # [r, in]
    B: Tensor  # [out, r]
    shift: Tensor | None = None

    def tensors(self, layer: nn.Module, with_shift: bool) -> dict[str, Tensor]:
        """The pair by PEFT's names and in its shapes: for a convolution it is two convolutions."""
        A, B = self.A, self.B
        if isinstance(layer, CONVOLUTIONS):
            A = A.reshape(len(A), *layer.weight.shape[1:])
            B = B.reshape(*B.shape, *(1,) * len(layer.kernel_size))
        tensors = {"lora_A.weight": A, "lora_B.weight": B}
        if with_shift:
            zero = self.B.new_zeros(len(self.B))
            tensors["lora_B.bias"] = zero if self.shift is None else self.shift
        return tensors


@dataclass
class _Adapter:
    """The contents of an adapter."""

    pairs: dict[str, Pair] = field(default_factory=dict)  # by the layer's name
    whole: set[str] = field(default_factory=set)  # modules of which the adapter holds everything


def to_lora(net: IncrementalNet, task: str | int, folder: str | Path) -> None:
    """Write a committed task as a LoRA adapter, which PEFT loads onto the module that the network
    was grown from, with as many classes as the task has.

    What the task selects of all factors becomes one pair per layer, and its biases the pair's. Its
    head, norms and whatever is not a plain Linear or convolution are saved whole, as PEFT's
    `modules_to_save`. A tensor of the root module, such as a `cls_token` kept per task, cannot be
    in an adapter, and raises an error.

    Args:
        net: a network grown with `base="keep"`.
        task: a committed task's name or index.
        folder: where to write `adapter_config.json` and `adapter_model.safetensors`.
    """
    refuse_without_base(net)
    index = net._tasks.committed(task)
    if net._tasks.tasks[index].views > 1:
        raise RankupError(
            f"task {net.tasks[index]!r} answers from four turned views, which no adapter can: "
            "learn it with views=1"
        )
    with net.gathered():
        plain = net.merged(index)
    adapter = _collect(net, plain, index)
    if "" in adapter.whole:
        own = [layer for layer in net.layers if _owner(layer) == "" and _differs(layer, index)]
        at_root = [layer.spec.name for layer in own]
        raise RankupError(
            f"a LoRA adapter cannot hold the task's own {folded(at_root)}, which lies in no module "
            "that could be saved: use net.merged(task), which holds everything"
        )
    if not adapter.pairs:
        raise RankupError(f"task {net.tasks[index]!r} changes no layer that LoRA can adapt")
    folder = Path(folder)
    try:
        make_folder(folder)
        write_file(folder / TENSORS, save(_tensors(adapter, plain), {"format": "pt"}))
        write_json(folder / CONFIG, _config(adapter, plain))
    except OSError as error:
        raise StoreError(f"the adapter cannot be written to {folder}: {error}") from None


def refuse_without_base(net: IncrementalNet) -> None:
    """Raise unless a network keeps the weights of its module, to which an adapter adds."""
    if net.options.base != "keep":
        raise RankupError(
            "a LoRA adapter adds to weights of a module, which this network does not have: grow it "
            "with base='keep'"
        )


def _collect(net: IncrementalNet, plain: nn.Module, index: int) -> _Adapter:
    _refuse_tied(net, plain, index)
    found = _Adapter()
    shifts: dict[str, Tensor] = {}
    for layer in net.layers:
        owner = _owner(layer)
        added, base = layer.added(_row(layer, index)), layer.base()
        if isinstance(layer, FactoredLayer) and takes_pair(plain.get_submodule(owner)):
            if (pair := _pair(layer, index)) is not None:
                found.pairs[owner] = pair
            if layer.spec.has_own_bias:
                shifts[owner] = added["bias"] - base["bias"]
        elif layer.spec.name == f"{owner}.bias" and takes_pair(plain.get_submodule(owner)):
            shifts[owner] = added["value"] - base["value"]
        elif _differs(layer, index):
            found.whole.add(owner)
    for name, shift in shifts.items():
        if shift.any():
            inputs = _inputs(plain.get_submodule(name))
            nothing = Pair(shift.new_zeros(1, inputs), shift.new_zeros(len(shift), 1))
            found.pairs.setdefault(name, nothing).shift = shift
    # PEFT saves every module whose name ends like one of those to save. A module inside another is
    # saved with that one, and a saved module has no pair.
    found.whole = {name for name in found.whole if not _is_within(name, found.whole)}
    names = [name for name, _ in plain.named_modules() if name]
    found.whole |= {name for name in names if name.endswith(tuple(found.whole - {""}))}
    for name in [n for n in found.pairs if n in found.whole or _is_within(n, found.whole)]:
        del found.pairs[name]
    return found


def _is_within(name: str, modules: set[str]) -> bool:
    return name.startswith(tuple(f"{module}." for module in modules if module))


def _refuse_tied(net: IncrementalNet, plain: nn.Module, index: int) -> None:
    names: dict[int, list[str]] = {}
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    learned = tuple(f"{_owner(layer)}." for layer in net.layers if _differs(layer, index))
    for tied in names.values():
        if len(tied) > 1 and any(name.startswith(learned) for name in tied):
            raise RankupError(
                f"{' and '.join(tied[:2])} are one parameter, which a LoRA adapter would part: use "
                "net.merged(task), which keeps them one"
            )


def _owner(layer: TaskLayer) -> str:
    """The name of the module that a task layer replaces, entirely or in part."""
    return owner_of(layer.spec) if is_substituted(layer.spec) else layer.spec.name


def _row(layer: TaskLayer, index: int) -> int:
    return 0 if isinstance(layer, TaskNorm) and layer.spec.shared else index


def takes_pair(layer: Any) -> bool:
    """Whether PEFT's pair for a layer computes the same as factors. Its pairs for convolutions
    support neither groups nor dilation nor modes of padding."""
    if type(layer) in CONVOLUTIONS:
        plain = layer.groups == 1 and set(layer.dilation) == {1}
        return plain and layer.padding_mode == "zeros"
    return type(layer) is nn.Linear or _has_inputs_first(layer)


def _has_inputs_first(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Conv1D"  # of transformers


def _inputs(layer: Any) -> int:
    weight: Tensor = layer.weight
    return len(weight) if _has_inputs_first(layer) else weight[0].numel()


def _pair(layer: FactoredLayer, index: int) -> Pair | None:
    """A task's factors as a pair, without those that it does not select or that are zero; None if
    none are left."""
    U, V, selector = layer.block(index)
    scaled = U * selector[:, None]
    used = scaled.any(1) & V.any(1)
    return Pair(V[used], scaled[used].t()) if bool(used.any()) else None


def _differs(layer: TaskLayer, index: int) -> bool:
    """Whether a layer has other weights for a task than the module that the network was grown
    from."""
    if isinstance(layer, FactoredLayer):
        return _pair(layer, index) is not None or (
            layer.spec.has_own_bias
            and not torch.equal(layer.added(index)["bias"], layer.base()["bias"])
        )
    if isinstance(layer, TaskHead):
        return True
    added, base = layer.added(_row(layer, index)), layer.base()
    return not all(key in base and torch.equal(added[key], base[key]) for key in added)


def _tensors(adapter: _Adapter, plain: nn.Module) -> dict[str, Tensor]:
    shifted = any(pair.shift is not None for pair in adapter.pairs.values())
    tensors = {
        f"{PREFIX}{name}.{key}": tensor
        for name, pair in adapter.pairs.items()
        for key, tensor in pair.tensors(plain.get_submodule(name), shifted).items()
    }
    for name in sorted(adapter.whole):
        for key, tensor in plain.get_submodule(name).state_dict().items():
            tensors[f"{PREFIX}{name}.{key}"] = tensor
    # Copies, because safetensors refuses tensors that share memory.
    return {key: t.detach().cpu().clone().contiguous() for key, t in tensors.items()}


def _config(adapter: _Adapter, plain: Any) -> dict[str, Any]:
    name = getattr(getattr(plain, "config", None), "name_or_path", None)
    ranks = {layer: len(pair.A) for layer, pair in adapter.pairs.items()}
    rank = max(ranks.values())
    # PEFT's patterns also match the ends of names, and the first match counts: longer names first.
    others = {re.escape(layer): ranks[layer] for layer in sorted(ranks, key=len, reverse=True)}
    patterns = others if len(set(ranks.values())) > 1 else {}
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": name or None,
        "r": rank,
        "lora_alpha": rank,  # so that the pairs are not scaled
        "rank_pattern": patterns,
        "alpha_pattern": patterns,
        "target_modules": "|".join(map(re.escape, ranks)),
        "modules_to_save": sorted(adapter.whole),
        "lora_bias": any(pair.shift is not None for pair in adapter.pairs.values()),
        "fan_in_fan_out": any(_has_inputs_first(plain.get_submodule(layer)) for layer in ranks),
        "inference_mode": True,
    }
