"""Starting heads at the means of their classes' features, computed before the task is learned."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from rankup.layers import TaskHead
from rankup.net.network import IncrementalNet
from rankup.training.memory_format import for_answers
from rankup.utils.torch_modes import evaluating

# How much likelier the nearest mean starts than one at the average distance, as a difference of
# logits: large enough to be of use, small enough that the softmax still has a gradient.
_SHARPNESS = 4.0


@torch.no_grad()
def start_heads_from_means(
    net: IncrementalNet, batches: Iterable[tuple[Tensor, Tensor]], classes: int
) -> None:
    """Set the heads of the open task so that they choose the class with the nearest mean.

    A head stays as it was drawn if its input is not one vector per sample, or all means are equal.

    Args:
        batches: inputs and their classes; with rotations turned ones, too.
        classes: how many classes there are; with rotations, with turned ones.
    """
    heads = [layer for layer in net.layers if isinstance(layer, TaskHead) and not layer.spec.taps]
    index = len(net.tasks)
    features: dict[TaskHead, list[Tensor]] = {head: [] for head in heads}
    hooks = [
        head.register_forward_pre_hook(lambda layer, inputs: features[layer].append(inputs[0]))
        for head in heads
    ]
    labels: list[Tensor] = []
    try:
        with evaluating(net):
            for x, y in batches:
                net._run_for(index, for_answers(net.body, x), {})
                labels.append(y)
    finally:
        for hook in hooks:
            hook.remove()
    for head, found in features.items():
        if len(found) == len(labels) and all(part.dim() == 2 for part in found):
            _start(head, torch.cat(found), torch.cat(labels), classes)


def _start(head: TaskHead, features: Tensor, labels: Tensor, classes: int) -> None:
    start = nearest_mean(features, labels, classes)
    if start is None or head.new_weight.shape != start[0].shape:
        return
    weight, bias = start
    head.new_weight.copy_(weight)
    if head.spec.bias:
        head.new_bias.copy_(bias)


def nearest_mean(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor] | None:
    """The weight and bias of a Linear that chooses the class with the nearest mean; None if all
    means are equal. A class without samples gets the mean of all samples.

    Args:
        features: `[N, in]`.
        labels: `[N]`.
    """
    x = features.to(torch.float32)  # [N, in]
    members = F.one_hot(labels, classes).to(x.dtype)  # [N, classes]
    counts, middle = members.sum(0)[:, None], x.mean(0)
    means = torch.where(counts > 0, members.t() @ x / counts.clamp(min=1), middle) - middle
    spread = means.square().sum(1).mean()
    if not spread > 0:
        return None
    # −|x − mean|², without the terms that are the same for all classes.
    weight = means * (_SHARPNESS / spread)
    return weight, -((means / 2 + middle) * weight).sum(1)
