"""Normalisation layers with weights and statistics per task."""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup.distributed.ranks import Ranks, pooled_norm
from rankup.errors import TaskStateError
from rankup.layers.base import Start
from rankup.layers.calibrate import Pool
from rankup.layers.dispatch import samples_to_plan
from rankup.layers.mixed_call import GatheringLayer, MixedTables
from rankup.layers.spec import NormSpec
from rankup.layers.tables import Selection, without_row
from rankup.layers.tensors import Tensors, at_least_float32, over_channels
from rankup.rank import Place

_BATCH_NORMS = {"batch1d": nn.BatchNorm1d, "batch2d": nn.BatchNorm2d, "batch3d": nn.BatchNorm3d}


class TaskNorm(GatheringLayer):
    """Normalisation with weights and, if it has any, statistics per task.

    Batch statistics are not running averages. The task being learned uses those of its batch, in
    training and evaluation alike; committed tasks use the ones pooled at their commit.
    """

    spec: NormSpec

    _TABLES: ClassVar = {"weight": "weights", "bias": "biases", "mean": "means", "var": "vars"}

    def __init__(self, spec: NormSpec, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, seed, dtype, device)
        kept = spec.shapes(Place(), 0)
        for key, table in self._TABLES.items():
            rows = torch.empty(0, *spec.shape, **self._factory) if key in kept else None
            self.register_buffer(table, rows)
        self.register_buffer("base_weight", None)
        self.register_buffer("base_bias", None)
        self.pool: Pool | None = None
        self.ranks: Ranks | None = None  # whose batches are normalised together in training
        self._wide = at_least_float32(self.dtype)
        # As in torch's own, for a module's forward to read; setting them changes nothing.
        self.eps = spec.eps
        if spec.is_over_last:
            self.normalized_shape, self.elementwise_affine = spec.shape, spec.weight
        else:
            self.affine = spec.weight
        if spec.is_batch:
            self.num_features = spec.shape[0]
        elif spec.over == "group":
            self.num_groups, self.num_channels = spec.groups, spec.shape[0]

    @property
    def weight(self) -> Tensor | None:
        """The weight of the active task, if there is one, for a module's forward to read."""
        return self._read("weight") if self.spec.weight else None

    @property
    def bias(self) -> Tensor | None:
        return self._read("bias") if self.spec.bias else None

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        task = self._task(input)
        x = self._widened_input(input)
        y = self._answer(x, 0 if self.spec.shared else task)
        return y if x is input else y.to(input.dtype)

    def _answer(self, input: Tensor, task: int | Tensor) -> Tensor:
        if isinstance(task, Tensor):
            return self._mixed(input, task)
        if self._knows(task):
            return self._normalise(input, **{key: rows[task] for key, rows in self._rows().items()})
        if self.pool is not None:
            self.pool.add(input)
        if self.ranks and self.spec.is_batch and self.training and torch.is_grad_enabled():
            new = self._parameters
            return pooled_norm(input, new.get("new_weight"), new.get("new_bias"), self.spec.eps)
        return self._normalise(
            input, self._parameters.get("new_weight"), self._parameters.get("new_bias")
        )

    def extra_repr(self) -> str:
        spec = self.spec
        return (
            f"{spec.over}, {'×'.join(map(str, spec.shape))}, weight={spec.weight}, bias={spec.bias}"
        )

    def start(self, classes: int, start: Start) -> Tensors:
        if self.spec.shared and self.count:
            return {}
        if start.norms == "previous" and (last := start.previous(self.count)) is not None:
            previous = self.added(last)
            return {key: previous[key].clone() for key in self.spec.base_shapes()}
        fresh = {"weight": torch.ones, "bias": torch.zeros}
        base = self.base()
        return {
            key: base[key].clone() if key in base else fresh[key](shape, **self._factory)
            for key, shape in self.spec.base_shapes().items()
        }

    @property
    def wants_statistics(self) -> bool:
        """Whether the task being learned cannot be committed without statistics of its data."""
        return self.spec.is_batch and not (self.spec.shared and self.count)

    def start_pooling(self) -> None:
        self.pool = Pool(self.spec.shape[0], self._factory["device"])

    def learned(self) -> Tensors:
        learned = super().learned()
        if self.pool is not None:
            learned |= {key: v.to(**self._factory) for key, v in self.pool.statistics().items()}
        return learned

    def close(self) -> None:
        super().close()
        self.pool = None

    def extended(self, *added: Tensors, selections: Sequence[Selection] = (None,)) -> Tensors:
        tables = {}
        for key in added[0]:  # of a shared norm, the first task's alone
            rows = torch.stack([tensors[key] for tensors in added if key in tensors])
            tables[self._TABLES[key]] = torch.cat([getattr(self, self._TABLES[key]), rows])
        return tables

    def without(self, task: int) -> Tensors:
        if self.spec.shared:
            return {}
        return {self._TABLES[key]: without_row(rows, task) for key, rows in self._rows().items()}

    def added(self, task: int) -> Tensors:
        if self.spec.shared and task > 0:
            return {}
        return {key: rows[task] for key, rows in self._rows().items()}

    def merged(self, task: int) -> nn.Module:
        values = self.added(0 if self.spec.shared else task)
        spec = self.spec
        norm: nn.Module
        affine = spec.weight or spec.bias
        if spec.over in _BATCH_NORMS:
            norm = _BATCH_NORMS[spec.over](spec.shape[0], spec.eps, affine=affine, **self._factory)
            norm.running_mean, norm.running_var = values["mean"].clone(), values["var"].clone()
        elif spec.over == "layer":
            norm = nn.LayerNorm(spec.shape, spec.eps, affine, spec.bias, **self._factory)
        elif spec.over == "rms":
            norm = nn.RMSNorm(spec.shape, spec.eps, affine, **self._factory)
        else:
            norm = nn.GroupNorm(spec.groups, spec.shape[0], spec.eps, affine, **self._factory)
        for key in spec.base_shapes():
            setattr(norm, key, nn.Parameter(values[key].clone()))
        return norm.to(self.computes_in).eval()

    def _read(self, key: str) -> Tensor:
        def read(task: int) -> Tensor:
            return self.added(task)[key] if self._knows(task) else self.get_parameter(f"new_{key}")

        return read(0) if self.spec.shared else self._read_of_task(key, self.spec.shape, read)

    def _rows(self) -> Tensors:
        buffers = self._buffers  # once: another thread may swap in those of one more task
        tables = {key: buffers[table] for key, table in self._TABLES.items()}
        return {key: table for key, table in tables.items() if table is not None}

    def _normalise(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        mean: Tensor | None = None,
        var: Tensor | None = None,
    ) -> Tensor:
        if self.spec.is_batch:
            if mean is None and x.numel() == x.shape[1]:
                raise TaskStateError(
                    f"the batch norm {self.spec.name!r} takes statistics of every batch, but got a "
                    "single value per channel: use batches of at least two samples"
                )
            return F.batch_norm(x, mean, var, weight, bias, mean is None, 0.0, self.spec.eps)
        if self.spec.over == "layer":
            return F.layer_norm(x, self.spec.shape, weight, bias, self.spec.eps)
        if self.spec.over == "rms":
            return F.rms_norm(x, self.spec.shape, weight, self.spec.eps)
        return F.group_norm(x, self.spec.groups, weight, bias, self.spec.eps)

    def _mixed(self, x: Tensor, tasks: Tensor) -> Tensor:
        if self.spec.is_over_last:
            return self._mixed_over_last(x, tasks)
        # Few positions are slow to normalise on a GPU. Not under autocast, where torch's own norm,
        # unlike this arithmetic, keeps the input's dtype.
        if self.spec.is_batch and (x.dim() == 2 or (x.is_cuda and x.dtype == self.dtype)):
            return self._mixed_batch_norm(x, tasks)
        if not x.shape[0]:
            return x  # torch cannot normalise zero channels
        if torch.compiler.is_compiling() and not self.spec.is_batch:
            # With groups per sample, torch.compile would compile again for every batch size.
            gathered = _rows_of(self._rows(), tasks).items()
            rows = {key: over_channels(row, x).to(x.dtype) for key, row in gathered}
            y = self._normalise(x)
            y = y * rows["weight"] if "weight" in rows else y
            return y + rows["bias"] if "bias" in rows else y
        # As one sample with the channels of all samples, [1, B·C, …], and rows [B·C].
        rows = {key: row.view(-1) for key, row in _rows_of(self._rows(), tasks).items()}
        merged = x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])
        if self.spec.is_batch:
            return self._normalise(merged, **rows).view(x.shape)
        groups = self.spec.groups * len(x)
        # Not F.group_norm, which refuses groups of a single value.
        affine = rows.get("weight"), rows.get("bias")
        return torch.group_norm(merged, groups, *affine, self.spec.eps).view(x.shape)

    def mixed_sources(self) -> tuple[Tensor, ...]:
        return tuple(self._rows().values()) if self.spec.is_over_last else ()

    def mixed_tables(self, dtype: torch.dtype) -> MixedTables:
        if not self.spec.is_over_last:
            return MixedTables()
        return MixedTables(tuple(rows.flatten(1).to(dtype) for rows in self._rows().values()))

    def _mixed_over_last(self, x: Tensor, tasks: Tensor) -> Tensor:
        y = self._normalise(x.to(self._wide))
        if self.spec.weight:
            rows, _ = self._gathered(tasks, self._wide)
            between = (1,) * (x.dim() - 1 - len(self.spec.shape))
            weight, *bias = (row.view(row.shape[0], *between, *self.spec.shape) for row in rows)
            y = torch.addcmul(bias[0], y, weight) if bias else y * weight
        # Where autocast is on, a GPU's own norm answers in full precision.
        autocast = x.is_cuda and torch.is_autocast_enabled("cuda")
        return y.to(self.dtype if autocast else x.dtype)

    def _mixed_batch_norm(self, x: Tensor, tasks: Tensor) -> Tensor:
        """A single multiply-add on `x`. Its scales and shifts are computed for all tasks, or per
        sample if there are more tasks than samples."""
        tables = self._rows()
        few = len(tables["var"]) <= samples_to_plan(x)
        rows = self._widened(tables if few else _rows_of(tables, tasks))
        scale = torch.rsqrt(rows["var"] + self.spec.eps)
        if "weight" in rows:
            scale = scale * rows["weight"]
        if "bias" in rows:
            shift = torch.addcmul(rows["bias"], rows["mean"], scale, value=-1)
        else:
            shift = -rows["mean"] * scale
        if few:
            shift, scale = shift.index_select(0, tasks), scale.index_select(0, tasks)
        return torch.addcmul(over_channels(shift, x), x, over_channels(scale, x)).to(x.dtype)

    def _widened(self, rows: Tensors) -> Tensors:
        """Rows in at least float32, in which torch's own norms compute, too."""
        if self._wide == self.dtype:
            return rows
        return {key: row.to(self._wide) for key, row in rows.items()}

    def _check(self, x: Tensor) -> None:
        shape = self.spec.shape
        if self.spec.is_over_last:
            if tuple(x.shape[-len(shape) :]) != shape:
                self._refuse_shape(x, f"{list(shape)} as the last dimensions")
        elif x.dim() < 2 or x.shape[1] != shape[0]:
            self._refuse_shape(x, f"[batch, {shape[0]} channels, …]")
        self._check_dtype(x)


def _rows_of(tables: Tensors, tasks: Tensor) -> Tensors:
    """A row per sample of each table, `[B, …]`. Gathered one by one: to gather all tables at once,
    the rows of all tasks would have to be copied first."""
    return {key: table.index_select(0, tasks) for key, table in tables.items()}
