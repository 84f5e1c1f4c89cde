"""Ways to run a mixed batch through the heads of all tasks."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rankup.layers.dispatch import (
    HeadsShape,
    block_count,
    block_size,
    length_to_plan,
    samples_to_plan,
)
from rankup.layers.tensors import over_last


class Blocks(NamedTuple):
    """A batch arranged in blocks of equal size, each with samples of one task. Unused places hold
    sample 0."""

    samples: Tensor  # [blocks · size]: the sample at each place
    tasks: Tensor  # [blocks]
    places: Tensor  # [B]: the place of each sample


def in_blocks(tasks: Tensor, known: int, size: int) -> Blocks:
    """Sort by task. All shapes follow from that of the batch: nothing waits for the device."""
    count, device = block_count(len(tasks), known, size), tasks.device
    ordered, order = torch.sort(tasks)
    edges = torch.searchsorted(ordered, torch.arange(known + 1, device=device))
    blocks = (edges.diff() + (size - 1)) // size  # of each task
    ends = blocks.cumsum(0)
    moved = (ends - blocks) * size - edges[:-1]  # how far a task's samples move
    at = torch.arange(len(tasks), device=device) + moved.index_select(0, ordered)
    numbered = torch.arange(count, device=device)
    return Blocks(
        samples=order.new_zeros(count * size).scatter_(0, at, order),
        tasks=torch.searchsorted(ends, numbered, right=True).clamp_(max=known - 1),
        places=torch.empty_like(order).scatter_(0, order, at),
    )


class Heads:
    """All tasks' heads, as the layer's tables hold them."""

    def __init__(self, weights: Tensor, biases: Tensor | None, rows: Tensor) -> None:
        self.weights, self.biases, self.rows = weights, biases, rows
        self.total, self.inputs = weights.shape
        self.known, self.widest = rows.shape
        self.alike = self.known * self.widest == self.total  # equally many classes in all tasks

    def shape(self, x: Tensor) -> HeadsShape:
        planned = samples_to_plan(x), length_to_plan(x)
        return HeadsShape(*planned, self.known, self.inputs, self.widest, self.total)

    def answers(self, x: Tensor, tasks: Tensor) -> Tensor:
        """Logits `[N, positions, widest]` for `x [N, positions, in]` and the task of each entry;
        arbitrary where a task has fewer classes than the widest."""
        weights = self._of(tasks, self.weights).transpose(1, 2)
        if self.biases is None:
            return torch.bmm(x, weights)
        return torch.baddbmm(self._of(tasks, self.biases)[:, None], x, weights)

    def _of(self, tasks: Tensor, table: Tensor) -> Tensor:
        if self.alike:
            return table.view(self.known, self.widest, *table.shape[1:]).index_select(0, tasks)
        rows = self.rows.clamp(min=0).index_select(0, tasks)
        return table.index_select(0, rows.view(-1)).view(*rows.shape, *table.shape[1:])


def gathered(x: Tensor, tasks: Tensor, heads: Heads) -> Tensor:
    """Copy a head for each sample."""
    if x.dim() == 2:
        return heads.answers(x.unsqueeze(1), tasks).squeeze(1)
    flat = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), heads.inputs)
    return heads.answers(flat, tasks).view(*x.shape[:-1], heads.widest)


def together(x: Tensor, tasks: Tensor, heads: Heads) -> Tensor:
    """Compute the logits of all tasks, and pick each sample's."""
    # On a GPU, a product with a bias is left to a library that the host takes long to call.
    apart = x.is_cuda and heads.alike and heads.biases is not None
    answers = F.linear(x, heads.weights, None if apart else heads.biases)
    leading = x.shape[:-1]
    if not heads.alike:
        rows = over_last(heads.rows.clamp(min=0).index_select(0, tasks), x)
        return answers.gather(-1, rows.expand(*leading, heads.widest))
    picked = tasks.view(-1, *(1,) * x.dim()).expand(*leading, 1, heads.widest)
    logits = answers.view(*leading, heads.known, heads.widest).gather(-2, picked).squeeze(-2)
    if apart and heads.biases is not None:
        biases = heads.biases.view(heads.known, heads.widest).index_select(0, tasks)
        logits += over_last(biases, x)
    return logits


def sorted_by_task(x: Tensor, tasks: Tensor, heads: Heads) -> Tensor:
    """Copy a head for each block of samples of one task."""
    blocks = in_blocks(tasks, heads.known, block_size(len(x), heads.known))
    arranged = x.index_select(0, blocks.samples)
    flat = arranged.view(len(blocks.tasks), -1, heads.inputs)
    answers = heads.answers(flat, blocks.tasks).view(*arranged.shape[:-1], heads.widest)
    return answers.index_select(0, blocks.places)


WAYS = {"gathered": gathered, "together": together, "sorted": sorted_by_task}
