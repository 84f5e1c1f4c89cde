"""The parameters of the task being learned, by what they are."""

from typing import TYPE_CHECKING

from torch import nn

from rankup.layers.spec import FactoredSpec, HeadSpec, NormSpec

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet

KINDS = ("heads", "factors", "selectors", "biases", "norms", "other")

_OF_FACTORED = {"new_selector": "selectors", "new_bias": "biases"}


def by_kind(net: "IncrementalNet") -> dict[str, list[nn.Parameter]]:
    """Every one of `net.parameters()` exactly once. Vectors of modules with a forward of their own
    are `norms` if they are a norm's, `biases` if they are called so, else `other`."""
    found: dict[str, list[nn.Parameter]] = {kind: [] for kind in KINDS}
    kinds: dict[int, str] = {}
    for layer in net.layers:
        for key, parameter in layer.named_parameters():
            kinds[id(parameter)] = _kind(net, layer.spec, key)
    for parameter in net.parameters():
        found[kinds.get(id(parameter), "other")].append(parameter)
    return found


def _kind(net: "IncrementalNet", spec: object, key: str) -> str:
    if isinstance(spec, HeadSpec):
        return "heads"
    if isinstance(spec, NormSpec):
        return "norms"
    if isinstance(spec, FactoredSpec):
        return _OF_FACTORED.get(key, "factors")
    owner, _, name = str(spec.name).rpartition(".")  # type: ignore[attr-defined]
    if "norm" in type(net.body.get_submodule(owner)).__name__.lower():
        return "norms"
    return "biases" if "bias" in name else "other"
