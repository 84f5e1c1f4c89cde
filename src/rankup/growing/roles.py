"""The roles of parameters in layers that run their own forward: matrices get factors, vectors are
kept per task, all others stay as they are."""

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import ParametrizationList

from rankup.growing.readers import Reading
from rankup.growing.supported import Modules
from rankup.rank import Shape

Role = Literal["matrix", "vector", "frozen"]
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

# Torch's layers whose weights are matrices of a product or kernels of a convolution.
_WITH_MATRICES = (
    nn.Linear,
    _ConvNd,
    nn.Bilinear,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)
# Parts of names of parameters that are not kept per task, whatever reads them.
_TOKENS = ("token", "embed", "pos", "prompt", "query", "latent", "mask", "table")

_GATES = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}


@dataclass(frozen=True)
class Form:
    """How a parameter is made of matrices."""

    count: int = 1  # matrices that are stacked in its first dimension
    transposed: bool = False  # whether a matrix is [in, out], not [out, in]

    def part_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (shape[0] // self.count, *shape[1:])

    def matrix(self, shape: Sequence[int]) -> Shape:
        """The shape of each matrix in a parameter of that shape."""
        first, *rest = self.part_shape(shape)
        if len(shape) == 3 and self.count > 1:  # of experts
            first, *rest = rest
        others = math.prod(rest)
        return Shape(others, first) if self.transposed else Shape(first, others)


def role_of(layer: nn.Module, key: str, parameter: Tensor, readings: Collection[Reading]) -> Role:
    """The role of a parameter of a layer. One of an unknown kind stays as it is.

    Args:
        readings: how operations read it, as far as that is known.
    """
    is_token = any(word in key.lower() for word in _TOKENS)
    if isinstance(layer, EMBEDDINGS) or is_token or not parameter.is_floating_point():
        return "frozen"
    if isinstance(layer, ParametrizationList):
        return "frozen"  # what is made of them gets factors
    if sum(size > 1 for size in parameter.shape) <= 1:
        return "vector"
    if isinstance(layer, _WITH_MATRICES) and "weight" in key:
        return "matrix"
    return "matrix" if readings and "other" not in readings else "frozen"


def depends_on_reading(layer: nn.Module, key: str, parameter: Tensor) -> bool:
    """Whether a parameter's role depends on what reads it, not only on its layer's class."""
    product: Reading = "product"
    return role_of(layer, key, parameter, ()) != role_of(layer, key, parameter, (product,))


def form_of(layer: nn.Module, key: str, parameter: Tensor, readings: Collection[Reading]) -> Form:
    """How a parameter that is a matrix, or several, is made of them."""
    if isinstance(layer, nn.MultiheadAttention) and key == "in_proj_weight":
        return Form(count=3)
    gates = next((count for kind, count in _GATES.items() if isinstance(layer, kind)), 1)
    if gates > 1 and key.startswith(("weight_ih", "weight_hh")):
        return Form(count=gates)
    if isinstance(layer, _WITH_MATRICES):
        return Form(transposed=isinstance(layer, _ConvTransposeNd))
    transposed = any(reading.startswith("transposed") for reading in readings)
    by_product = not any(reading.endswith("convolution") for reading in readings)
    if by_product and parameter.dim() == 3:  # experts, or what else lies in one parameter
        return Form(len(parameter), transposed)
    return Form(transposed=transposed)


def places_of(modules: Modules) -> dict[int, list[tuple[str, nn.Module, str]]]:
    """By the id of each parameter, the places where it is: full name, layer and key. A parameter
    that several layers share has several."""
    places: dict[int, list[tuple[str, nn.Module, str]]] = defaultdict(list)
    for name, module in modules.items():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places[id(parameter)].append((f"{name}.{key}".lstrip("."), module, key))
    return dict(places)


def attention_parts(modules: Modules) -> tuple[str, ...]:
    """The names of modules that are attention, judging by their own names or their classes'."""
    return tuple(
        name
        for name, module in modules.items()
        if name
        and any(
            word in text.lower()
            for word in ("attention", "attn")
            for text in (name.rpartition(".")[2], type(module).__name__)
        )
    )
