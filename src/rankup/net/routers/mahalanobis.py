"""The Mahalanobis distance of a head's inputs to the nearest class mean (Lee et al., 2018). All
classes of a task have one covariance, shrunk, of which the largest components are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rankup.layers import Tensors
from rankup.net.routers.base import Examples, Layouts, RoutedBatch, Router, run_for

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet

_COMPONENTS = 16
_SHRUNK = 0.1  # towards the mean variance
_MOST = 10_000  # samples


class Mahalanobis(Router):
    name = "mahalanobis"

    def learn(self, net: IncrementalNet, task: int, examples: Examples) -> Tensors:
        parts, labels, count = [], [], 0
        for x, y, options in examples.train():
            parts.append(run_for(net, x, task, options).features.double())
            labels.append(y)
            if (count := count + len(x)) >= _MOST:
                break
        features, y = torch.cat(parts), torch.cat(labels)
        means = _class_means(features, y, net._tasks.tasks[task].classes)
        centred = features - means[y]
        variances, axes = torch.linalg.eigh(centred.t() @ centred / len(centred))
        few = min(_COMPONENTS, len(variances))
        mean = variances.mean().clamp(min=1e-12)
        shrunk = (1 - _SHRUNK) * variances.clamp(min=0) + _SHRUNK * mean
        rest = shrunk[:-few].mean() if few < len(shrunk) else mean
        return {
            "means": means.half(),
            "axes": axes[:, -few:].t().contiguous().half(),
            # The inverse variance off the axes, then by how much that along each axis differs.
            "inverses": torch.cat([1 / rest[None], 1 / shrunk[-few:] - 1 / rest]).float(),
        }

    def fits(self, batch: RoutedBatch, task: int, row: Tensors) -> Tensor:
        features = batch.of(task).features.float()
        apart = features[:, None] - row["means"].to(features)  # [B, C, in]
        along = apart @ row["axes"].to(features).t()  # [B, C, components]
        inverses = row["inverses"].to(features)
        distances = apart.square().sum(-1) * inverses[0] + along.square() @ inverses[1:]
        return -distances.amin(1)

    def layouts(self, classes: int) -> Layouts:
        return {
            "means": ((torch.float16,), (classes, None)),
            "axes": ((torch.float16,), (None, None)),
            "inverses": ((torch.float32,), (None,)),
        }


def _class_means(features: Tensor, y: Tensor, classes: int) -> Tensor:
    """`[C, in]`; the overall mean for a class without samples."""
    sums = features.new_zeros(classes, features.shape[1]).index_add_(0, y, features)
    counts = torch.bincount(y, minlength=classes)[:, None]
    return torch.where(counts > 0, sums / counts.clamp(min=1), features.mean(0))
