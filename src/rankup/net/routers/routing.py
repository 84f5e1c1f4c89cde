"""The state of a network's routers: tensors for each task, and sums over all tasks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from rankup.errors import RankupError, TaskStateError
from rankup.growing.routing import RouterRule
from rankup.layers import Tensors
from rankup.net.routers.analytic import Discriminants, solve
from rankup.net.routers.base import Examples, Layouts, RoutedBatch
from rankup.net.routers.registry import routers_of
from rankup.net.routers.sums import Sums

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet

LEVELS = 101  # of the quantiles of how well held-out samples fit their task
_QUANTILES = "quantiles"  # their name in a task's file

Value = TypeVar("Value")


@dataclass(frozen=True)
class TaskRow:
    """The tensors that routers store of one task, named `router.key`."""

    name: str
    classes: int
    tensors: Tensors

    def of(self, router: str) -> Tensors:
        start = f"{router}."
        return {k.removeprefix(start): t for k, t in self.tensors.items() if k.startswith(start)}


class Routing:
    """How a network guesses among the tasks that it knows. Immutable, so that other threads may go
    on using it: methods that add or remove tasks return a new one.

    Attributes:
        rows: what is stored of each task.
        total: sums over all tasks, for the analytic router.
    """

    def __init__(
        self,
        rule: RouterRule,
        seed: int,
        rows: tuple[TaskRow, ...] = (),
        total: Sums | None = None,
    ) -> None:
        self.rule, self.seed, self.rows, self.total = rule, seed, rows, total
        self.routers = routers_of(rule, seed)
        ends = [*accumulate((row.classes for row in rows), initial=0)]
        self._columns = [slice(start, end) for start, end in pairwise(ends)]
        self._cache: dict[Any, Any] = {}  # what follows from the rows, by device

    @property
    def has_sums(self) -> bool:
        """Whether there are sums over all tasks, and no task stores its own part of them."""
        return "analytic" in self.routers and not self.rule.apart

    def columns(self, task: int) -> slice:
        """A task's classes among the `ΣC` classes of all tasks."""
        return self._columns[task]

    def learned(self, net: IncrementalNet, examples: Examples) -> Routing:
        """A routing with one more task: the network's last, which has just been committed."""
        task = len(self.rows)
        known = net._tasks.tasks[task]
        tensors: Tensors = {}
        for name, router in self.routers.items():
            learned = router.learn(net, task, examples).items()
            tensors |= {f"{name}.{key}": tensor.cpu() for key, tensor in learned}
        drafted = self._with(TaskRow(known.name, known.classes, tensors))
        return drafted._scaled(net, examples)

    def _with(self, row: TaskRow) -> Routing:
        tensors, total = dict(row.tensors), self.total
        if "analytic.gram" in tensors:
            own = Sums.unpacked(tensors["analytic.gram"], int(tensors["analytic.counts"].sum()))
            total = own if total is None else total + own
            if not self.rule.apart:
                del tensors["analytic.gram"]
        return Routing(self.rule, self.seed, (*self.rows, replace(row, tensors=tensors)), total)

    def _scaled(self, net: IncrementalNet, examples: Examples) -> Routing:
        """A routing in which the last task has centres, scales and quantiles, computed from its
        held-out samples."""
        *before, last = self.rows
        task, tensors = len(before), dict(last.tensors)
        raw: dict[str, list[Tensor]] = {name: [] for name in self.routers}
        for x, _, options in examples.held_out():
            batch = RoutedBatch(net, self, x, options)
            for name, router in self.routers.items():
                raw[name].append(router.fits(batch, task, self._row(task, name, x.device)).float())
        together: Tensor | float = 0.0
        for name, weight in self.rule.weights:
            fits = torch.cat(raw[name])
            _refuse_not_finite(fits, name, last.name)
            centre, scale = self.routers[name].scaling or _scaling(fits)
            tensors[f"{name}.scaling"] = torch.tensor([centre, scale])
            together = together + weight * ((fits - centre) / scale)
        assert isinstance(together, Tensor)
        levels = torch.linspace(0, 1, LEVELS, device=together.device)
        tensors[_QUANTILES] = together.quantile(levels).half().cpu()
        rows = (*before, replace(last, tensors=tensors))
        return Routing(self.rule, self.seed, rows, self.total)

    def fits(self, batch: RoutedBatch, name: str) -> Tensor:
        """`[B, T]`: how well samples fit tasks by one router, centred and scaled. Undefined where
        a task is no candidate."""
        if (key := f"fits by {name}") not in batch.cache:
            columns = [self._fits(batch, name, task) for task in range(len(self.rows))]
            batch.cache[key] = torch.stack(columns, 1)
        found: Tensor = batch.cache[key]
        return found

    def _fits(self, batch: RoutedBatch, name: str, task: int) -> Tensor:
        router, row = self.routers[name], self._row(task, name, batch.x.device)
        if router.runs_tasks and not batch.asks(task):
            return torch.zeros(len(batch.x), device=batch.x.device)
        centre, scale = row["scaling"]
        fits: Tensor = (router.fits(batch, task, row).float() - centre) / scale
        return fits

    def quantiles(self, device: torch.device) -> Tensor:
        """`[T, levels]`: quantiles of how well each task's held-out samples fit it. With the
        analytic router, whose scores change with every new task, the last task's serve for all."""
        own = [row.tensors[_QUANTILES] for row in self.rows]
        own = own[-1:] * len(own) if "analytic" in self.routers else own
        return self._kept(("quantiles", device), lambda: torch.stack(own).to(device).float())

    def discriminants(self, device: torch.device) -> Discriminants:
        """The analytic router's solution for all tasks."""
        solved = self._kept("solved", self._solve)
        return self._kept(("solved", device), lambda: solved.to(device))

    def _solve(self) -> Discriminants:
        """Classes are taken in the order of their tasks' names, so that the bits do not depend on
        the order in which tasks were learned."""
        assert self.total is not None
        order = sorted(range(len(self.rows)), key=lambda task: self.rows[task].name)
        of_tasks = [self.rows[task].of("analytic") for task in order]
        sums = torch.cat([row["sums"].to(torch.int64) for row in of_tasks])
        counts = torch.cat([row["counts"] for row in of_tasks])
        columns = [list(range(*self.columns(task).indices(sys.maxsize))) for task in order]
        back = torch.tensor([column for each in columns for column in each]).argsort()
        alike = not self.rule.patches
        return solve(self.total, sums, counts, alike).reordered(back)

    def _row(self, task: int, router: str, device: torch.device) -> Tensors:
        return self._kept(
            (task, router, device),
            lambda: {k: t.to(device) for k, t in self.rows[task].of(router).items()},
        )

    def _kept(self, key: Any, make: Callable[[], Value]) -> Value:
        if key not in self._cache:
            self._cache[key] = make()
        found: Value = self._cache[key]
        return found

    def without(self, task: int) -> Routing:
        """A routing without a task; refused if the task's part of the sums is not known."""
        row, total = self.rows[task], self.total
        if self.has_sums:
            raise TaskStateError(
                f"task {row.name!r} cannot be removed: the network's router keeps one sum over all "
                "tasks; grow it with router='analytic,apart' to remove tasks"
            )
        rows = (*self.rows[:task], *self.rows[task + 1 :])
        if total is not None:
            total = total - _own_sums(row)
        return Routing(self.rule, self.seed, rows, total if rows else None)

    def joined(self, other: Routing, tasks: Sequence[int]) -> Routing:
        """A routing with tasks of another network's routing."""
        if self.rule != other.rule:
            raise RankupError(
                f"only networks of one router can be joined, not of {self.rule} and {other.rule}"
            )
        if self.has_sums and len(tasks) < len(other.rows):
            raise RankupError(
                "networks that know some of the same tasks cannot be joined: each router keeps one "
                "sum over all tasks; grow them with router='analytic,apart'"
            )
        return self.appended([other.rows[task] for task in tasks], other.total)

    def appended(self, rows: Sequence[TaskRow], total: Sums | None) -> Routing:
        """A routing with more rows, of a file or of another network.

        Args:
            total: the sums of what is appended, where tasks do not keep their own.
        """
        added = self.total
        parts = [_own_sums(row) for row in rows] if self.rule.apart else [total] if total else []
        for part in parts:
            added = part if added is None else added + part
        self.check(rows)
        return Routing(self.rule, self.seed, (*self.rows, *rows), added)

    def check(self, rows: Sequence[TaskRow]) -> None:
        """Raise `ValueError` if rows do not fit each other and those that there are."""
        for name, router in self.routers.items():
            before = [row.of(name) for row in self.rows[:1]]
            for row in rows:
                router.check(row.of(name), before)
                before = before or [row.of(name)]

    def layouts(self, classes: int) -> Layouts:
        """The dtypes and shapes of what is stored of a task with that many classes, by name."""
        found: Layouts = {_QUANTILES: ((torch.float16,), (LEVELS,))}
        for name, router in self.routers.items():
            found[f"{name}.scaling"] = (torch.float32,), (2,)
            own = router.layouts(classes).items()
            found |= {f"{name}.{key}": layout for key, layout in own}
        return found

    def bytes_of(self, task: int) -> int:
        return sum(tensor.nbytes for tensor in self.rows[task].tensors.values())

    def bytes_of_sums(self) -> int:
        """What the file of the sums takes, if there is one."""
        return self.total.packed().nbytes if self.has_sums and self.total is not None else 0


def _own_sums(row: TaskRow) -> Sums:
    own = row.of("analytic")
    return Sums.unpacked(own["gram"], int(own["counts"].sum()))


def _scaling(fits: Tensor) -> tuple[float, float]:
    return float(fits.mean()), max(float(fits.std(correction=0)), 1e-6)


def _refuse_not_finite(fits: Tensor, router: str, task: str) -> None:
    if not len(fits) or not bool(fits.isfinite().all()):
        what = "is not finite" if len(fits) else "needs samples that were held out"
        raise TaskStateError(f"what router {router!r} says of task {task!r} {what}")
