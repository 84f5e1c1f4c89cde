"""Linear discriminant analysis on fixed features, with one covariance for the classes of all tasks.
It is solved in closed form from sums over samples, so the order of tasks does not matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rankup.errors import RankupError
from rankup.layers import Tensors
from rankup.net.routers.base import Examples, Layouts, RoutedBatch, Router
from rankup.net.routers.features import represented, seeded_features
from rankup.net.routers.patches import patch_features
from rankup.net.routers.sums import WHOLE, Sums, narrow

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet

_SHRUNK = 0.01  # share of the diagonal that is added to a covariance
_SOFTENED = 0.1  # factor of log-likelihoods, because classes are not quite normally distributed
_SOFTENED_PATCHES = 0.35  # where the likelihood of held-out images of S-CIFAR100 is largest


class Discriminants(NamedTuple):
    """The solution for `D` features and the `ΣC` classes of all tasks."""

    overall: Tensor  # [D]: the mean feature
    maps: Tensor  # [D, ΣC]: inverse covariance times the classes' means
    halves: Tensor  # [ΣC]: half of each mean's squared length in that metric
    within: Tensor  # [D, D]: inverse covariance inside classes
    background: Tensor  # [D, D]: inverse covariance of all samples as one class

    def to(self, device: torch.device) -> Discriminants:
        return Discriminants(*(tensor.to(device) for tensor in self))

    def reordered(self, order: Tensor) -> Discriminants:
        """With the classes in another order."""
        return self._replace(maps=self.maps[:, order], halves=self.halves[order])


class Likelihoods(NamedTuple):
    """Log-likelihoods of samples."""

    classes: Tensor  # [B, ΣC]: of each class, without the term that all classes share
    common: Tensor  # [B]: that term, minus the log-likelihood of all samples as one class


class Analytic(Router):
    name = "analytic"
    runs_tasks = False
    scaling = 0.0, 64.0  # fixed, because every new task changes the covariance of all

    def features(self, net: IncrementalNet, rows: Tensor) -> Tensor:
        if self.rule.patches:
            return patch_features(rows, self.rule.features, self.seed)
        keeps = net.options.base == "keep"
        return seeded_features(rows, self.rule.features, self.seed, keeps)

    def learn(self, net: IncrementalNet, task: int, examples: Examples) -> Tensors:
        """Per class the sums and counts of features, and in `gram` the sums of their products,
        which `Routing` adds to those of other tasks."""
        classes = net._tasks.tasks[task].classes
        counts = torch.zeros(classes, dtype=torch.int64, device="cpu")
        sums: Tensor | None = None
        total: Sums | None = None
        for x, y, options in examples.train():
            rows = self.features(net, represented(net, x, options))
            exact = rows.new_zeros(classes, rows.shape[1], dtype=torch.float64)
            own = exact.index_add_(0, y, rows.double()).to("cpu", torch.int64)
            sums = own if sums is None else sums + own
            counts += torch.bincount(y, minlength=classes).cpu()
            batch = Sums.of([rows])
            total = batch if total is None else total + batch
        assert sums is not None
        assert total is not None
        return {"sums": narrow(sums), "counts": counts, "gram": total.packed()}

    def fits(self, batch: RoutedBatch, task: int, row: Tensors) -> Tensor:
        """How much likelier the nearest class is than the background (Ren et al., 2021)."""
        logs = self._likelihoods(batch)
        return logs.classes[:, batch.routing.columns(task)].amax(1) + logs.common

    def votes(self, batch: RoutedBatch, fits: Tensor) -> Tensor:
        each = [self._softened(batch, task).logsumexp(1) for task in range(fits.shape[1])]
        return torch.stack(each, 1)

    def class_votes(self, batch: RoutedBatch, task: int) -> Tensor:
        own = self._softened(batch, task)
        # Only the network can tell a class without samples.
        lowest = own.masked_fill(own.isinf(), torch.inf).amin(1, keepdim=True)
        return torch.where(own.isinf(), lowest, own)

    def _softened(self, batch: RoutedBatch, task: int) -> Tensor:
        """`[B, C]`: the log-likelihoods of a task's classes, softened."""
        softening = _SOFTENED_PATCHES if self.rule.patches else _SOFTENED
        return softening * self._likelihoods(batch).classes[:, batch.routing.columns(task)]

    def _likelihoods(self, batch: RoutedBatch) -> Likelihoods:
        if "analytic" not in batch.cache:
            rows = self.features(batch.net, batch.representation())
            batch.cache["analytic"] = likelihoods(batch.routing.discriminants(rows.device), rows)
        logs: Likelihoods = batch.cache["analytic"]
        return logs

    def layouts(self, classes: int) -> Layouts:
        layouts: Layouts = {
            "sums": (WHOLE, (classes, None)),
            "counts": ((torch.int64,), (classes,)),
        }
        return layouts | ({"gram": (WHOLE, (None,))} if self.rule.apart else {})

    def check(self, row: Tensors, others: Sequence[Tensors]) -> None:
        super().check(row, others)
        width = row["sums"].shape[1]
        if self.rule.apart and len(row["gram"]) != width * (width + 1) // 2:
            raise ValueError("'gram' is not of as many features as 'sums'")
        if int(row["counts"].min()) < 0:
            raise ValueError("'counts' has a negative number")


def likelihoods(known: Discriminants, rows: Tensor) -> Likelihoods:
    """Log-likelihoods of samples with features `rows [B, D]`."""
    if rows.shape[1] != len(known.overall):
        raise RankupError(
            f"these inputs have {rows.shape[1]} features for the router, the tasks' have "
            f"{len(known.overall)}: all need one shape"
        )
    apart = rows - known.overall
    own = ((apart @ known.within) * apart).sum(1)
    background = ((apart @ known.background) * apart).sum(1)
    return Likelihoods(apart @ known.maps - known.halves, (background - own) / 2)


def solve(total: Sums, sums: Tensor, counts: Tensor, alike: bool = True) -> Discriminants:
    """Discriminants from the sums over all samples and over each class, `[ΣC, D]`.

    Args:
        alike: whether covariances shrink towards the mean variance, or towards each feature's own.
    """
    gram, counted = total.gram.double(), counts.double()[:, None]
    overall = sums.double().sum(0) / total.count
    means = sums.double() / counted.clamp(min=1) - overall
    scatter = gram - total.count * torch.outer(overall, overall)
    between = (means * counted).t() @ means
    within = _inverse((scatter - between) / total.count, alike)
    maps = within @ means.t()
    halves = (means * maps.t()).sum(1) / 2
    halves[counts == 0] = torch.inf  # a class without samples is never likely
    background = _inverse(scatter / total.count, alike)
    return Discriminants(*(t.float() for t in (overall, maps, halves, within, background)))


def _inverse(covariance: Tensor, alike: bool) -> Tensor:
    variances = covariance.diagonal()
    mean = variances.mean().clamp(min=1e-6)
    likely = mean.expand_as(variances) if alike else variances.clamp(min=1e-3 * mean)
    shrunk = covariance + torch.diag(_SHRUNK * likely)
    return torch.cholesky_inverse(torch.linalg.cholesky(shrunk))
