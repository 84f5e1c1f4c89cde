"""Norms in a mixed batch: their cost does not grow with tasks that are not in it, and in half
precision they are no less exact than for one task."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.zoo import relative_error
from rankup.layers import TaskNorm, active
from rankup.layers.spec import NormOver, NormSpec
from rankup.rank import Place

CHANNELS = 32

Shape = tuple[int, ...]  # of a sample
NORMS: dict[str, tuple[NormOver, Shape]] = {
    "batch": ("batch1d", (CHANNELS,)),
    "batch over sequences": ("batch1d", (CHANNELS, 4)),
    "layer": ("layer", (CHANNELS,)),
    "layer over sequences": ("layer", (4, CHANNELS)),
    "rms": ("rms", (CHANNELS,)),
    "group": ("group", (CHANNELS, 4)),
}


def norm_of(over: NormOver, tasks: int, dtype: torch.dtype = torch.float32) -> TaskNorm:
    """A norm with random weights, for inputs that are far from zero."""
    spec = NormSpec(
        "norm", over, (CHANNELS,), 1e-5, 2, weight=True, bias=over != "rms", shared=False
    )
    norm = TaskNorm(spec, 0, dtype, torch.device("cpu"))
    for task in range(tasks):
        draw = torch.Generator().manual_seed(task)
        added = {
            key: torch.randn(size, generator=draw)
            for key, size in spec.shapes(Place.number(0), 2).items()
        }
        if spec.is_batch:
            added |= {"mean": 10 + 0.1 * added["mean"], "var": 0.09 * added["var"].exp()}
        norm.install(norm.extended({key: value.to(dtype) for key, value in added.items()}))
    return norm


def far(*shape: int) -> Tensor:
    return 10 + 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(7))


class Numbers(TorchDispatchMode):
    """Counts the numbers that torch's operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else [made]:
            self.count += one.numel()
        return made


@pytest.mark.parametrize(("over", "shape"), NORMS.values(), ids=NORMS)
def test_batch_costs_as_much_however_many_tasks_there_are(over: NormOver, shape: Shape) -> None:
    x, ids, counts = far(5, *shape), torch.tensor([2, 0, 5, 5, 1]), []
    for tasks in (6, 60):
        norm = norm_of(over, tasks)
        with active(ids), torch.no_grad(), Numbers() as numbers:
            norm(x)
        counts.append(numbers.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("samples", [3, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("over", ["batch1d", "layer", "rms"])
def test_half_precision_is_rounded_once(over: NormOver, dtype: torch.dtype, samples: int) -> None:
    norm = norm_of(over, tasks=5, dtype=dtype)
    x, ids = far(samples, CHANNELS).to(dtype), torch.arange(samples) % 5
    exact = torch.cat(
        [norm.merged(task).double()(x[i : i + 1].double()) for i, task in enumerate(ids.tolist())]
    )
    one = []
    for i, task in enumerate(ids.tolist()):
        with active(task):
            one.append(norm(x[i : i + 1]))
    with active(ids):
        mixed = norm(x)
    assert mixed.dtype == dtype
    assert relative_error(mixed.double(), exact) < 1.1 * relative_error(torch.cat(one), exact)


def test_group_norm_with_groups_of_one_value() -> None:
    norm = norm_of("group", tasks=2)
    norm.spec = replace(norm.spec, groups=CHANNELS)
    x, ids = far(4, CHANNELS, 1), torch.tensor([0, 1, 1, 0])
    with active(ids):
        mixed = norm(x)
    for task in (0, 1):
        with active(task):
            assert torch.equal(mixed[ids == task], norm(x)[ids == task])
