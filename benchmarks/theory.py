"""What a step of a grown network needs by formula, however it is computed."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import rankup
from rankup.layers import FactoredLayer, TaskHead
from rankup.layers.spec import FactoredSpec


@dataclass(frozen=True)
class Need:
    multiplications: int
    bytes: int  # that must be read or written

    def times(self, number: int) -> "Need":
        return Need(number * self.multiplications, number * self.bytes)


def step_needs(
    net: rankup.IncrementalNet,
    module: nn.Module,
    sample: Tensor,
    batch: int,
    *,
    projected: bool,
    width: int,
) -> Need:
    """A training step of the network's open task.

    Bytes are those of the batch; of all factors, read once; of every learned number with its two
    moments, read and written; and of each layer's outputs and their gradients, each written and
    read once, in numbers of `width` bytes.

    Args:
        module: what the network was grown from.
        sample: one training sample.
        projected: whether the projections of the data on the first layer's old factors are
            computed once and part of the batch.
    """
    task, places = len(net.tasks), _places(module, sample)
    factored = [part.spec for part in net.parts if isinstance(part, FactoredLayer)]
    # Layers are listed in the order in which they run.
    first = factored[0]
    multiplications = sum(
        _multiplications(
            spec, batch * places[spec.name], task, first=spec is first, projected=projected
        )
        for spec in factored
    )
    read = sum(
        4
        * spec.rank.used(task)
        * (spec.outputs + (0 if projected and spec is first else spec.inputs))
        for spec in factored
    )
    outputs = sum(4 * width * batch * places[spec.name] * spec.outputs for spec in factored)
    added = first.rank.added(task)
    fed = 8 * batch  # the labels
    if not projected or added:
        fed += batch * sample.numel() * sample.element_size()
    if projected:
        fed += 4 * batch * (first.rank.used(task) - added)
    learned = sum(p.numel() for p in net.parameters())
    (head,) = (part for part in net.parts if isinstance(part, TaskHead))
    multiplications += 3 * batch * head.new_weight.numel()
    return Need(multiplications, read + outputs + fed + 6 * 4 * learned)


def _places(module: nn.Module, sample: Tensor) -> dict[str, int]:
    """How often each layer applies its matrix to one sample."""
    found: dict[str, int] = {}
    hooks = []
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear | nn.Conv2d):

            def note(part: nn.Module, _: object, y: Tensor, name: str = name) -> None:
                found[name] = y[0].numel() // y.shape[-1 if isinstance(part, nn.Linear) else 1]

            hooks.append(part.register_forward_hook(note))
    device = next(module.parameters()).device
    with torch.no_grad():
        module.eval()(rankup.data.to_float(sample[None]).to(device))
    for hook in hooks:
        hook.remove()
    return found


def _multiplications(
    spec: FactoredSpec, places: int, task: int, *, first: bool, projected: bool
) -> int:
    """Forward and backward, in whichever form takes fewer: factors, or the matrix they form."""
    inputs, outputs = spec.inputs, spec.outputs
    rank, added = spec.rank.used(task), spec.rank.added(task)
    seen = added if first and projected else rank
    factors = places * (seen * inputs + 2 * rank * outputs + added * (inputs + outputs))
    weights = inputs * outputs * (2 * places + 2 * rank + 2 * added)
    if not first:
        factors += places * rank * inputs
        weights += places * inputs * outputs
    return min(factors, weights)
