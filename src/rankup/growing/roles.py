"""Roles in modules that others wrote: which layer is the head, and which parameters of layers that
run their own forward are matrices, which get factors, or vectors, which are kept per task."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from torch import nn
from torch.nn.modules.conv import _ConvNd

from rankup.errors import RankupError
from rankup.growing.trace import Trace

Role = Literal["matrix", "vector", "frozen"]

# The kinds of torch whose weights are those of a product or a convolution.
_WITH_MATRICES = (
    nn.Linear,
    _ConvNd,
    nn.Bilinear,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)
# Classes of others, by what their names say: transformers' Conv1D, experts in one parameter.
_NAMED_AFTER_PRODUCTS = ("linear", "conv", "expert", "dense", "attention")
_TOKENS = ("token", "embed", "pos", "prompt", "query", "latent", "mask", "table")

# Names that transformers' models give their heads.
_HEADS = ("classifier", "score", "head", "fc", "out_proj", "classification_head")


def role_of(layer: nn.Module, key: str, parameter: nn.Parameter) -> Role:
    """What becomes of a layer's own parameter. What is not known is shared, and stays as it is."""
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) or not parameter.is_floating_point():
        return "frozen"
    if sum(size > 1 for size in parameter.shape) <= 1:
        # A token is learned for the network as a whole, however few numbers it has.
        return "frozen" if any(word in key.lower() for word in _TOKENS) else "vector"
    name = type(layer).__name__.lower()
    if isinstance(layer, _WITH_MATRICES) and "weight" in key:
        return "matrix"
    by_name = any(word in name for word in _NAMED_AFTER_PRODUCTS)
    is_table = any(word in key.lower() for word in (*_TOKENS, "bias"))
    return "matrix" if by_name and not is_table and parameter.dim() in (2, 3, 4, 5) else "frozen"


def tied_parameters(modules: Mapping[str, nn.Module]) -> set[int]:
    """Ids of parameters that several modules hold."""
    parameters = (p for module in modules.values() for p in module._parameters.values())
    places = Counter(id(parameter) for parameter in parameters if parameter is not None)
    return {parameter for parameter, count in places.items() if count > 1}


def choose_head(
    modules: Mapping[str, nn.Module], given: str | None, training: Trace, evaluation: Trace
) -> str:
    """The Linear that is given, that the module calls its classifier, or that runs last."""
    linears = [name for name, layer in modules.items() if isinstance(layer, nn.Linear)]
    if given is not None:
        if given not in linears:
            raise RankupError(
                f"head={given!r} is not a Linear of the module, which has "
                + (", ".join(linears) or "none")
            )
        return given
    if (named := _named_head(modules)) is not None:
        return named
    if not linears:
        raise RankupError(
            "the module has no Linear that could be the head: give it one, for example on "
            "x.permute(0, 2, 3, 1) in place of a 1×1 convolution"
        )
    if training.failed:
        raise RankupError(
            "torch.fx cannot trace the module, so it is not known which Linear runs last: name "
            "it with head='name'"
        )
    head = _last_linear(training, modules)
    if not evaluation.failed and (other := _last_linear(evaluation, modules)) != head:
        raise RankupError(
            f"the Linear that runs last is {head!r} in training and {other!r} in evaluation: name "
            "the head with head='name'"
        )
    return head


def _last_linear(trace: Trace, modules: Mapping[str, nn.Module]) -> str:
    for name in reversed(trace.order):
        if isinstance(modules[name], nn.Linear):
            return name
        if any(True for _ in modules[name].parameters()):
            raise RankupError(
                f"the module has no Linear that could be the head: {name!r} runs after the last of "
                "them; name the head with head='name'"
            )
    raise RankupError("the module runs no Linear that could be the head")


def _named_head(modules: Mapping[str, nn.Module]) -> str | None:
    """The name of the Linear that the module calls its classifier, if it says so."""
    whole: Any = modules[""]
    if callable(get := getattr(whole, "get_classifier", None)):
        return _head_of(get(), modules)
    labels = getattr(getattr(whole, "config", None), "num_labels", None)
    if labels is None:
        return None
    named = [
        name
        for name, layer in modules.items()
        if isinstance(layer, nn.Linear)
        and layer.out_features == labels
        and any(part in _HEADS for part in name.split("."))
    ]
    return named[-1] if named else None


def _head_of(found: Any, modules: Mapping[str, nn.Module]) -> str | None:
    heads = list(found) if isinstance(found, tuple | list) else [found]
    names = [name for name, layer in modules.items() if any(layer is head for head in heads)]
    if len(heads) > 1:
        raise RankupError(
            f"the module has several heads, {' and '.join(map(repr, names))}: name one with "
            "head='name'"
        )
    if len(names) == 1 and isinstance(modules[names[0]], nn.Linear):
        return names[0]
    return None
