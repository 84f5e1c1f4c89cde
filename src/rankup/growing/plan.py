"""Plans of networks: what becomes of each layer of a module."""

import warnings
from dataclasses import dataclass

import torch

from rankup.growing.names import folded
from rankup.growing.options import GrowOptions
from rankup.layers.spec import DenseSpec, HeadSpec, LayerSpec, Spec, TensorSpec, WeightSpec
from rankup.layers.substitute import STATISTICS


@dataclass(frozen=True)
class Plan:
    """What a network is made of."""

    layers: tuple[LayerSpec, ...]  # what each layer becomes
    dense: DenseSpec  # what is left
    folds: tuple[tuple[str, str], ...]  # a convolution and the batch norm that is its only reader
    capped: tuple[str, ...]  # layers that a task gives less rank than was asked for
    # The Linear that reads the inputs as they are, if there is one and it is factored.
    first: str | None
    # The layers of a module that is nothing but factored Linears, a ReLU after each, and a head.
    chain: tuple[str, ...] | None
    # The torch.fx graph in training and in evaluation mode, as text; None if the module cannot be
    # traced or does not take the same path every time.
    paths: tuple[str | None, str | None]
    dtype: torch.dtype
    device: torch.device

    @property
    def substitutes(self) -> bool:
        """Whether modules read a task's tensors in place of their own: one task at a time."""
        return bool(self.substituted)

    @property
    def substituted(self) -> list[str]:
        return [spec.name for spec in self.layers if is_substituted(spec)]

    @property
    def specs(self) -> tuple[Spec, ...]:
        return (*self.layers, self.dense)

    def warn(self, options: GrowOptions) -> None:
        """Warn at the line of the caller's caller where less is learned than was asked for."""
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
    """Whether a module reads what the spec describes in place of tensors of its own."""
    if isinstance(spec, HeadSpec):
        return spec.own_forward
    return isinstance(spec, WeightSpec | TensorSpec) or spec.name.endswith(f".{STATISTICS}")


def owner_of(spec: Spec) -> str:
    """The name of the module that reads what a spec describes in place of its own."""
    if isinstance(spec, HeadSpec):
        return spec.name
    name = spec.parameter if isinstance(spec, WeightSpec) else spec.name
    return name.rpartition(".")[0]
