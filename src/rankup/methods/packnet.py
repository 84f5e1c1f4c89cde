"""PackNet (Mallya and Lazebnik, *PackNet: Adding Multiple Tasks to a Single Network by Iterative
Pruning*, CVPR 2018): every weight belongs to one task, and later tasks use it but do not change it.

A task trains all free weights, prunes the smallest, and retrains those that are left, which it then
owns:

    W_t = W ⊙ [owner ≤ t]
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from rankup import seeds
from rankup.errors import RankupError
from rankup.layers import Tensors
from rankup.methods.base import Setting
from rankup.methods.options import PackNetOptions
from rankup.methods.shared.bits import pack, packed_size, stray_bits, unpack
from rankup.methods.shared.guard import GuardedLearner, SubnetMethod, buffer_name
from rankup.methods.shared.layout import Layout, Layouts
from rankup.training.batches import Feed
from rankup.training.engine.learner import Learner


class PackNet(SubnetMethod):
    """The free weights of every layer are divided equally among the task and those to come. The
    owner of each weight is stored in ⌈log₂(T + 1)⌉ bits. Biases and norms are per task."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.bits = len(setting.tasks).bit_length()  # per owner
        for name, weight in self.weights.items():
            self._keep_owners(name, torch.zeros_like(weight, dtype=torch.int32))
        self._learner: PackNetLearner  # of the open task

    def owners(self, name: str) -> Tensor:
        """The owner of each entry of a weight: a task's number, from 1, or 0 if it is free."""
        weight = self.weights[name]
        return unpack(self.kept[_owners(name)], self.bits, weight.numel()).view_as(weight)

    @torch.no_grad()
    def learner(self, feed: Feed) -> Learner:
        if self.learned == len(self.setting.tasks):
            raise RankupError(
                f"packnet has divided its weights among {self.learned} tasks, but there is one more"
            )
        owned = {name: self.owners(name) > 0 for name in self.weights}
        held = {name: torch.where(owned[name], w, 0) for name, w in self.weights.items()}
        if self.learned:
            # Free weights are drawn anew: starting from zero they learn less.
            for name, weight in self.weights.items():
                weight.copy_(torch.where(owned[name], weight, self._drawn(name)))
        self.take_last_biases()
        self._learner = PackNetLearner(self, feed, self.constant() | owned, held)
        return self._learner

    def weights_of(self, task: int) -> Tensors:
        if task == self.learned:  # the open task uses all weights, as they are
            return {}
        tensors = {}
        for name, weight in self.weights.items():
            owners = self.owners(name)
            tensors[name] = torch.where((owners > 0) & (owners <= task + 1), weight, 0)
        return tensors

    def consolidate(self, feed: Feed) -> None:
        if self._learner.pruned_before == feed.recipe.epochs:
            self._learner.prune()
        for name in self.weights:
            others = self._learner.frozen(f"body.{name}")
            self._keep_owners(name, torch.where(others, self.owners(name), self.learned + 1))
        super().consolidate(feed)

    def kept_layouts(self, learned: int) -> Layouts:
        layouts = super().kept_layouts(learned)
        for name, weight in self.weights.items():
            wrong = partial(self._odd_owners, count=weight.numel(), learned=learned)
            size = packed_size(self.bits * weight.numel())
            layouts[f"kept/{_owners(name)}"] = Layout((size,), torch.uint8, wrong=wrong)
        return layouts

    def _odd_owners(self, packed: Tensor, count: int, learned: int) -> str | None:
        most = int(unpack(packed, self.bits, count).amax()) if count else 0
        if most > learned:
            return f"gives weights to task {most}, but {learned} are learned"
        return stray_bits(packed, self.bits * count)

    def _keep_owners(self, name: str, owners: Tensor) -> None:
        self.kept[_owners(name)] = pack(owners, self.bits)

    def _drawn(self, name: str) -> Tensor:
        """A new random weight, with the same initialisation as torch's own layers."""
        drawn = torch.empty(self.weights[name].shape, dtype=torch.float32)
        draw = seeds.generator(self.seed, "packnet", name, self.learned)
        return nn.init.kaiming_uniform_(drawn, math.sqrt(5), generator=draw).to(self.weights[name])


class PackNetLearner(GuardedLearner):
    """Trains the free weights, prunes them before the epoch `pruned_before`, and retrains the rest.
    Pruned weights stay zero until the next task."""

    def __init__(self, method: PackNet, feed: Feed, frozen: Tensors, held: Tensors) -> None:
        super().__init__(method.body, feed, method.learned, frozen, held)
        options, epochs = method.setting.options_of(PackNetOptions), feed.recipe.epochs
        self.weights = [f"body.{name}" for name in method.weights]
        self.sharers = len(method.setting.tasks) - method.learned
        # Retraining takes at least one epoch, even if that is the only one, because pruning alone
        # costs much accuracy.
        again = max(1, round(options.retrain * epochs)) if options.retrain else 0
        self.pruned_before = epochs - again
        self.mutated += tuple(buffer_name("frozen", name) for name in self.weights)

    def on_epoch_start(self, epoch: int) -> None:
        if epoch == self.pruned_before:
            self.prune()

    @torch.no_grad()
    def prune(self) -> None:
        """Freeze all but the task's share of the free weights, the largest ones, at zero."""
        for name in self.weights:
            frozen = self.frozen(name)
            free = int((~frozen).sum())
            # At least one, because a layer without any weight would pass nothing on.
            share = min(free, max(1, round(free / self.sharers)))
            sizes = self.get_parameter(name).abs().masked_fill(frozen, -1)
            largest = sizes.flatten().topk(share).indices
            frozen.fill_(True).view(-1)[largest] = False
        self.put_back()


def _owners(name: str) -> str:
    return f"{name}.owners"
