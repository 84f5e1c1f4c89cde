"""Which layers of a module are its heads: those that the user names, that the model itself names,
or that run last. And new heads for models that were built without one."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rankup import seeds
from rankup.errors import RankupError
from rankup.growing.copying import sharing_copy_of
from rankup.growing.names import folded
from rankup.growing.supported import (
    Modules,
    computes_as_torchs_own,
    has_hooks,
    shares_weight,
)
from rankup.growing.trace import Trace
from rankup.layers import CONVOLUTIONS
from rankup.layers.spec import HeadSpec

NEW = "new"  # the option `head` that asks for a new head

# Names that heads usually have, for modules that cannot be traced.
_NAMES = ("classifier", "score", "fc", "head", "classification_head")


def with_new_head(module: nn.Module) -> nn.Module:
    """The module with a head on its features: the model's own kind of head, if it can make one."""
    if callable(getattr(module, "reset_classifier", None)):
        made: Any = sharing_copy_of(module)
        with seeds.seeded_rng(torch.device("cpu"), 0):
            made.reset_classifier(2)
        return made  # type: ignore[no-any-return]
    config = getattr(module, "config", None)
    sizes = (getattr(module, "num_features", None), getattr(config, "hidden_size", None))
    width = next((size for size in sizes if isinstance(size, int)), None)
    if width is None:
        raise RankupError(
            "head='new' needs to know how many features the module gives: set module.num_features, "
            "or put a Linear behind the module yourself"
        )
    return WithHead(module, width)


class WithHead(nn.Module):
    """A module that gives features `[B, …, width]`, and a head that reads them."""

    def __init__(self, features: nn.Module, width: int) -> None:
        super().__init__()
        tensor = next(features.parameters())
        self.features = features
        self.head = nn.Linear(width, 2, device=tensor.device, dtype=tensor.dtype)
        self.training = features.training

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.head(self.features(*inputs, **options))


def choose_heads(
    modules: Modules, given: Sequence[str] | None, training: Trace, evaluation: Trace
) -> tuple[str, ...]:
    """The names of the heads: given ones, else those that the model names, else the last to run."""
    if given is not None and given != (NEW,):
        return tuple(dict.fromkeys(_given_head(name, modules) for name in given))
    if named := _named_by_model(modules):
        return named
    if not any(map(is_projection, modules.values())):
        raise RankupError(
            "the module has no Linear that could be the head, and no 1×1 convolution: pass "
            "head='new' if it gives features"
        )
    if not training.failed:
        return (_last_to_run(modules, training, evaluation),)
    named = tuple(
        last
        for name, child in modules[""].named_children()
        if name in _NAMES and (last := _last_projection(name, child)) is not None
    )
    if len(named) == 1:
        return named
    raise RankupError(
        "torch.fx cannot trace the module, so it is not known which Linear runs last: name it "
        "with head='name'" + (f"; it has {_joined(named[:4])}" if named else "")
    )


def is_projection(layer: nn.Module) -> bool:
    """Whether a layer is a Linear, or a 1×1 convolution with stride 1."""
    if isinstance(layer, CONVOLUTIONS):
        once = {*layer.kernel_size, *layer.stride, layer.groups} == {1}
        return once and layer.padding in ("valid", "same", (0,) * len(layer.kernel_size))
    return isinstance(layer, nn.Linear)


def head_spec(name: str, modules: Modules, read: Collection[str]) -> HeadSpec:
    """The spec of a head; raises if it cannot be replaced by one for each task."""
    layer: Any = modules[name]
    if (why := shares_weight(name, modules)) is not None:
        raise RankupError(
            f"the head {name!r} must have a weight of its own ({why}): replace it, or name another "
            "layer with head="
        )
    outputs, *rest = layer.weight.shape
    other = [k for k, p in layer._parameters.items() if p is not None and outputs in p.shape]
    if per_class := [key for key in other if key not in ("weight", "bias")]:
        raise RankupError(
            f"the head {name!r} has a parameter {per_class[0]!r} besides its weight and bias with "
            "entries for classes: tasks have other numbers of them; replace the head"
        )
    # A layer of a derived class that computes the same is replaced, which is faster.
    own_forward = (
        has_hooks(layer)
        or name in read
        or not (computes_as_torchs_own(layer) or _is_linear_map(layer))
    )
    has_bias = layer.bias is not None
    return HeadSpec(name, torch.Size(rest).numel(), has_bias, tuple(rest[1:]), own_forward)


def _is_linear_map(layer: Any) -> bool:
    """Whether a layer of a derived class computes what `nn.Linear` does, for random numbers."""
    if not isinstance(layer, nn.Linear):
        return False
    weight, bias = layer.weight, layer.bias
    try:
        with seeds.seeded_rng(weight.device, 0), torch.no_grad():
            x = torch.randn(2, weight.shape[1]).to(weight)
            return torch.equal(layer(x), F.linear(x, weight, bias))
    except Exception:  # of the layer's own code
        return False


def _given_head(name: str, modules: Modules) -> str:
    found = _last_projection(name, modules[name]) if name in modules else None
    if found is None or not name:
        projections = [name for name, layer in modules.items() if is_projection(layer)]
        raise RankupError(
            f"head={name!r} is not a Linear of the module, which has "
            + (folded(projections) or "none")
        )
    return found


def _named_by_model(modules: Modules) -> tuple[str, ...]:
    """The heads that timm's `get_classifier` gives or transformers' `num_labels` points to."""
    whole: Any = modules[""]
    if callable(get := getattr(whole, "get_classifier", None)):
        found = get()
        heads = found if isinstance(found, tuple | list) else (found,)
        if all(isinstance(head, nn.Identity) for head in heads):
            raise RankupError(
                "the model says that it has no classifier, as if built with num_classes=0: pass "
                "head='new' to give each task one on its features"
            )
        names = {id(module): name for name, module in modules.items()}
        named = [(names.get(id(head)), head) for head in heads]
        lasts = [_last_projection(name, head) for name, head in named if name is not None]
        return tuple(last for last in lasts if last is not None)
    labels = getattr(getattr(whole, "config", None), "num_labels", None)
    body = getattr(whole, "base_model_prefix", None)
    candidates = [
        last
        for name, child in whole.named_children()
        if labels is not None and name != body
        if (last := _last_projection(name, child)) is not None
        if len(_weight(modules[last])) == labels
    ]
    if len(candidates) > 1:
        _refuse_several(candidates)
    return tuple(candidates)


def _last_projection(name: str, module: nn.Module) -> str | None:
    """The name of the last Linear or 1×1 convolution in a module, or of the module itself."""
    inner = [key for key, layer in module.named_modules() if is_projection(layer)]
    return f"{name}.{inner[-1]}".strip(".") if inner else None


def _last_to_run(modules: Modules, training: Trace, evaluation: Trace) -> str:
    head = _last_in(training, modules)
    if not evaluation.failed and (other := _last_in(evaluation, modules)) != head:
        raise RankupError(
            f"the Linear that runs last is {head!r} in training and {other!r} in evaluation: name "
            "the head with head='name'"
        )
    return head


def _last_in(trace: Trace, modules: Modules) -> str:
    for name in reversed(trace.order):
        if is_projection(modules[name]):
            return _without_an_equal(name, trace, modules)
        if any(True for _ in modules[name].parameters()):
            raise RankupError(
                f"the module has no Linear that could be the head: {name!r} runs after the last of "
                "them; name the head with head='name'"
            )
    raise RankupError("the module runs no Linear that could be the head")


def _without_an_equal(name: str, trace: Trace, modules: Modules) -> str:
    """Raise if another layer with as many outputs reaches the module's output as directly."""
    width = len(_weight(modules[name]))
    equals = [
        other
        for other in trace.answers()
        if is_projection(modules[other]) and len(_weight(modules[other])) == width
    ]
    if len(equals) > 1:
        _refuse_several(equals)
    return name


def _refuse_several(names: Sequence[str]) -> None:
    raise RankupError(
        f"the module has several layers that could be its head, {_joined(names[:4])}: name one, or "
        f"all that answer together, with head={list(names[:4])!r}"
    )


def _weight(layer: Any) -> torch.Tensor:
    weight: torch.Tensor = layer.weight
    return weight


def _joined(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names))
