"""The plan of a network: what becomes of each layer of a module."""

import warnings
from dataclasses import dataclass

import torch

from rankup.growing.names import folded
from rankup.growing.options import GrowOptions
from rankup.layers.spec import DenseSpec, HeadSpec, LayerSpec, Spec, TensorSpec, WeightSpec
from rankup.layers.substitute import STATISTICS


@dataclass(frozen=True)
class Plan:
    """What a network is made of.

    Attributes:
        layers: the specs of all task layers.
        dense: the spec of all other tensors, which tasks share.
        folds: pairs of a convolution and the batch norm that is its only reader.
        capped: the layers to which tasks add less rank than was asked for.
        first: the factored Linear that reads the inputs as they are, if there is one.
        chain: the factored Linears of a module that is nothing but Linears with a ReLU after each
            and a head; None for all other modules.
        paths: the torch.fx graphs in training and in evaluation mode, as text; None if the module
            cannot be traced or does not always take the same path.
        dtype: what most of the module computes in.
        device: where the module's parameters are.
    """

    layers: tuple[LayerSpec, ...]
    dense: DenseSpec
    folds: tuple[tuple[str, str], ...]
    capped: tuple[str, ...]
    first: str | None
    chain: tuple[str, ...] | None
    paths: tuple[str | None, str | None]
    dtype: torch.dtype
    device: torch.device

    @property
    def substitutes(self) -> bool:
        """Whether there are modules that read a task's tensors in place of their own."""
        return bool(self.substituted)

    @property
    def substituted(self) -> list[str]:
        return [spec.name for spec in self.layers if is_substituted(spec)]

    @property
    def specs(self) -> tuple[Spec, ...]:
        return (*self.layers, self.dense)

    def warn(self, options: GrowOptions) -> None:
        """Warn, on behalf of `grow`'s caller, if less is learned than was asked for."""
        if self.capped:
            warnings.warn(
                "one task cannot add more rank than a layer's weight has: capped in "
                + folded(self.capped),
                stacklevel=3,
            )
        chosen = options.include is None and options.last is None
        left = [name for name in self.dense.trained if not options.excludes(name)]
        if chosen and left and options.base == "new":
            warnings.warn(
                "trained with the first task and constant after it, because they are neither "
                f"matrices nor vectors or belong to several layers: {folded(left)}; exclude them "
                "to say that this is meant",
                stacklevel=3,
            )


def is_substituted(spec: Spec) -> bool:
    """Whether the spec is of tensors that a module reads in place of its own."""
    if isinstance(spec, HeadSpec):
        return spec.own_forward
    return isinstance(spec, WeightSpec | TensorSpec) or spec.name.endswith(f".{STATISTICS}")


def owner_of(spec: Spec) -> str:
    """The name of the module that reads the tensors of such a spec."""
    if isinstance(spec, HeadSpec):
        return spec.name
    name = spec.parameter if isinstance(spec, WeightSpec) else spec.name
    return name.rpartition(".")[0]
