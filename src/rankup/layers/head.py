"""An output layer per task."""

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup.layers.base import Start, TaskLayer, Tensors, active_task, over_last
from rankup.specs import HeadSpec

HeadsWay = Literal["gathered", "together", "sorted"]


class HeadsShape(NamedTuple):
    """What the way of a mixed batch through the heads is chosen by."""

    samples: int
    places: int  # positions in a sample for which there is an answer
    tasks: int
    inputs: int
    widest: int  # classes of the task that has most
    total: int  # classes of all tasks


class _Reckoned(NamedTuple):
    """What a device does while it moves one number to or from its memory, and how many it could
    move while it sorts, and while the host starts a product with all heads, not with each."""

    multiplications: float
    sorting: float
    starting: float


_RECKONED = {"cpu": _Reckoned(4, 5 << 18, 0), "cuda": _Reckoned(20, 1 << 27, 1 << 22)}


def heads_way(shape: HeadsShape, device: str) -> HeadsWay:
    """How a mixed batch finds its heads: a copy of one for each sample, the answers of all heads
    together and each sample's picked from them, or a copy of one for each block of samples that
    were sorted by task. Whatever takes least, reckoned in numbers moved.

    A rule of shapes alone: the same batch shape takes the same way every time.
    """
    samples, places, tasks, inputs, widest, total = shape
    at_once, sorting, starting = _RECKONED.get(device, _RECKONED["cpu"])
    size = block_size(samples, tasks)
    blocks = block_count(samples, tasks, size)
    together = starting + samples * places * total * (2 + inputs / at_once)
    gathered = 3 * samples * widest * inputs
    sorted_ = sorting + 3 * blocks * (widest * inputs + size * places * (inputs + widest))
    if together <= min(gathered, sorted_):
        return "together"
    return "gathered" if gathered <= sorted_ else "sorted"


def block_size(samples: int, tasks: int) -> int:
    """How many samples of one task make a block: small enough that half-filled blocks, one for
    each task, are few beside the batch."""
    return max(1, samples // (2 * max(1, tasks)))


def block_count(samples: int, tasks: int, size: int) -> int:
    """How many blocks there can be at most, however the samples spread over the tasks."""
    return (samples + min(samples, tasks) * (size - 1)) // size


class Blocks(NamedTuple):
    """A batch in blocks, each of samples of one task, some places in them left over."""

    samples: Tensor  # [blocks · size]: which sample is at a place
    tasks: Tensor  # [blocks]
    places: Tensor  # [B]: where each sample is


def in_blocks(tasks: Tensor, known: int, size: int) -> Blocks:
    """Sorts by task. All shapes follow from that of the batch: nothing waits for the device."""
    count, device = block_count(len(tasks), known, size), tasks.device
    ordered, order = torch.sort(tasks)
    edges = torch.searchsorted(ordered, torch.arange(known + 1, device=device))
    blocks = (edges.diff() + (size - 1)) // size  # of each task
    ends = blocks.cumsum(0)
    moved = (ends - blocks) * size - edges[:-1]  # how far a task's samples go from where they were
    at = torch.arange(len(tasks), device=device) + moved.index_select(0, ordered)
    numbered = torch.arange(count, device=device)
    return Blocks(
        samples=order.new_zeros(count * size).scatter_(0, at, order),
        tasks=torch.searchsorted(ends, numbered, right=True).clamp_(max=known - 1),
        places=torch.empty_like(order).scatter_(0, order, at),
    )


_read_tables: Callable[[dict[str, Any]], tuple[Any, ...]] = itemgetter("weights", "biases", "rows")


class TaskHead(TaskLayer):
    """A full output layer per task, each with its own number of classes.

    Tables: `weights [ΣC, in]` and `biases [ΣC]`, one task's classes after another's; a task's rows
    stay where they are, and so does their alignment. `rows [T, widest]` says which they are, −1
    where a task has fewer classes than the widest.
    """

    spec: HeadSpec
    weights: Tensor
    biases: Tensor | None
    rows: Tensor
    new_weight: Tensor
    new_bias: Tensor

    def __init__(self, spec: HeadSpec, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, seed, dtype, device)
        self.register_buffer("weights", torch.empty(0, spec.inputs, **self._factory))
        self.register_buffer("biases", torch.empty(0, **self._factory) if spec.bias else None)
        self.register_buffer("rows", torch.empty(0, 0, dtype=torch.long, device=device))
        self.ends = [0]  # where each task's classes end

    @property
    def in_features(self) -> int:
        return self.spec.inputs

    @property
    def out_features(self) -> int:
        """How many answers the head gives: the classes of the task that is run, or in a mixed
        batch those of the task that has most."""
        if isinstance(active_task(), Tensor):
            return self.rows.shape[1]
        return len(self._own(self._task_read("number of classes"))[0])

    @property
    def weight(self) -> Tensor:
        """The weight of the task that is run, for a module's forward to look at."""
        return self._own(self._task_read("weight"))[0]

    @property
    def bias(self) -> Tensor | None:
        return self._own(self._task_read("bias"))[1] if self.spec.bias else None

    def extra_repr(self) -> str:
        return f"in={self.spec.inputs}, bias={self.spec.bias}"

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            self._refuse_shape(x, f"{self.in_features} features in the last dimension")
        task = self._task(x)
        if isinstance(task, Tensor):
            return self._mixed(x, task)
        return F.linear(x, *self._own(task))

    def start(self, classes: int, start: Start) -> Tensors:
        values = {"weight": self._orthogonal(classes, self.spec.inputs, "head")}
        if self.spec.bias:
            values["bias"] = torch.zeros(classes, **self._factory)
        return values

    def extended(self, added: Tensors) -> Tensors:
        classes, end = len(added["weight"]), self.ends[self.count]
        tables = {"weights": torch.cat([self.weights, added["weight"]])}
        if self.biases is not None:
            tables["biases"] = torch.cat([self.biases, added["bias"]])
        widest = max(classes, self.rows.shape[1])
        own = torch.arange(end, end + classes, device=self.rows.device)
        old = F.pad(self.rows, (0, widest - self.rows.shape[1]), value=-1)
        new = F.pad(own, (0, widest - classes), value=-1)
        return tables | {"rows": torch.cat([old, new[None]])}

    def install(self, tables: Tensors) -> None:
        self.ends.append(len(tables["weights"]))
        super().install(tables)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # As many classes in all, but maybe not of each task.
        self.ends = [0, *(self.rows >= 0).sum(1).cumsum(0).tolist()]

    def added(self, task: int) -> Tensors:
        weight, bias = self._own(task)
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    def plain(self, task: int) -> nn.Module:
        weight, bias = self._own(task)
        linear = nn.Linear(self.in_features, len(weight), bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.clone())
        if bias is not None:
            linear.bias = nn.Parameter(bias.clone())
        return linear

    def _own(self, task: int) -> tuple[Tensor, Tensor | None]:
        if task >= self.count:
            return self.new_weight, self.new_bias if self.spec.bias else None
        own = slice(self.ends[task], self.ends[task + 1])
        return self.weights[own], None if self.biases is None else self.biases[own]

    def _mixed(self, x: Tensor, tasks: Tensor) -> Tensor:
        heads = Heads(*_read_tables(self._buffers))
        logits = _WAYS[heads_way(heads.shape(x), x.device.type)](x, tasks, heads)
        if heads.alike:
            return logits
        missing = (heads.rows < 0).index_select(0, tasks)
        return logits.masked_fill(over_last(missing, x), -math.inf)


class Heads:
    """All tasks' heads, as the layer's tables hold them."""

    def __init__(self, weights: Tensor, biases: Tensor | None, rows: Tensor) -> None:
        self.weights, self.biases, self.rows = weights, biases, rows
        self.total, self.inputs = weights.shape
        self.known, self.widest = rows.shape
        self.alike = self.known * self.widest == self.total  # equally many classes in all tasks

    def shape(self, x: Tensor) -> HeadsShape:
        samples, places = len(x), math.prod(x.shape[1:-1])
        return HeadsShape(samples, places, self.known, self.inputs, self.widest, self.total)

    def answers(self, x: Tensor, tasks: Tensor) -> Tensor:
        """For every `x[i]`, `[positions, in]`, the answers of a task of its own; anything where
        that has fewer classes than the widest."""
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
    if x.dim() == 2:
        return heads.answers(x.unsqueeze(1), tasks).squeeze(1)
    flat = x.reshape(len(x), math.prod(x.shape[1:-1]), heads.inputs)
    return heads.answers(flat, tasks).view(*x.shape[:-1], heads.widest)


def together(x: Tensor, tasks: Tensor, heads: Heads) -> Tensor:
    # On a GPU a bias in the product sends it to another library, whose call takes the host longer
    # than all the rest.
    apart = x.is_cuda and heads.alike and heads.biases is not None
    answers = F.linear(x, heads.weights, None if apart else heads.biases)
    leading = x.shape[:-1]
    if not heads.alike:
        own = over_last(heads.rows.clamp(min=0).index_select(0, tasks), x)
        return answers.gather(-1, own.expand(*leading, heads.widest))
    own = tasks.view(-1, *(1,) * x.dim()).expand(*leading, 1, heads.widest)
    logits = answers.view(*leading, heads.known, heads.widest).gather(-2, own).squeeze(-2)
    if apart and heads.biases is not None:
        biases = heads.biases.view(heads.known, heads.widest).index_select(0, tasks)
        logits += over_last(biases, x)
    return logits


def sorted_by_task(x: Tensor, tasks: Tensor, heads: Heads) -> Tensor:
    blocks = in_blocks(tasks, heads.known, block_size(len(x), heads.known))
    arranged = x.index_select(0, blocks.samples)
    flat = arranged.view(len(blocks.tasks), -1, heads.inputs)
    answers = heads.answers(flat, blocks.tasks).view(*arranged.shape[:-1], heads.widest)
    return answers.index_select(0, blocks.places)


_WAYS = {"gathered": gathered, "together": together, "sorted": sorted_by_task}
