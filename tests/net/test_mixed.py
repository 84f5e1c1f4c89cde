"""Every way to compute a mixed batch equals a loop over its samples, and which one is taken follows
from shapes alone."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rankup
from helpers.sampling import sampled
from helpers.zoo import GPU, KINDS, RANKS, inputs, relative_error, taught
from rankup.layers import FactoredLayer, TaskHead, TaskNorm, active
from rankup.layers.dispatch import (
    HeadsShape,
    MixedShape,
    block_count,
    block_size,
    heads_way,
    mixed_way,
)
from rankup.layers.head_mixed import in_blocks
from rankup.layers.spec import HeadSpec, NormSpec
from rankup.rank import Place, Rank

F64 = torch.float64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def spread(batch: int, tasks: int, seed: int = 0) -> Tensor:
    return torch.randint(tasks, (batch,), generator=torch.Generator().manual_seed(seed))


CLASSES = {
    "one task": [4],
    "equal": [3, 3, 3],
    "unequal": [3, 2, 5, 2],
    "many equal": [2] * 40,
    "many unequal": [2 + task % 4 for task in range(40)],
}


def heads(classes: list[int], bias: bool) -> TaskHead:
    head = TaskHead(HeadSpec("head", 6, bias), 0, F64, torch.device("cpu"))
    for task, count in enumerate(classes):
        added = {"weight": drawn(count, 6, seed=task)}
        if bias:
            added["bias"] = drawn(count, seed=100 + task)
        head.install(head.extended(added))
    return head


def answer_by_answer(head: TaskHead, x: Tensor, tasks: Tensor) -> Tensor:
    """Each sample through its own head; classes that are missing are −inf."""
    widest = max(head.rows.shape[1], 0)
    pairs = zip(x, tasks.tolist(), strict=True)
    answers = [F.linear(sample, *head._of_task(task)) for sample, task in pairs]
    return torch.stack([F.pad(a, (0, widest - a.shape[-1]), value=-torch.inf) for a in answers])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("between", [(), (3,), (2, 2)])
@pytest.mark.parametrize("classes", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("way", ["gathered", "together", "sorted"])
def test_every_way_to_heads_equals_per_task_loop(
    way: str,
    classes: list[int],
    between: tuple[int, ...],
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rankup.layers.head.heads_way", lambda shape, device: way)
    head = heads(classes, bias)
    for batch in (1, 7, 90):
        x = drawn(batch, *between, 6, seed=batch)
        for tasks in (spread(batch, len(classes)), torch.full((batch,), len(classes) - 1)):
            with active(tasks):
                found = head(x)
            expected = answer_by_answer(head, x, tasks)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@given(
    tasks=st.integers(1, 12).flatmap(
        lambda known: st.tuples(st.just(known), st.lists(st.integers(0, known - 1), min_size=1))
    ),
    size=st.integers(1, 9) | st.none(),
)
def test_sorting_puts_every_sample_into_block_of_its_task(
    tasks: tuple[int, list[int]], size: int | None
) -> None:
    known, ids = tasks[0], torch.tensor(tasks[1])
    size = size or block_size(len(ids), known)
    blocks = in_blocks(ids, known, size)
    assert len(blocks.tasks) == block_count(len(ids), known, size)
    assert len(blocks.samples) == len(blocks.tasks) * size
    assert torch.equal(blocks.samples[blocks.places], torch.arange(len(ids)))
    assert torch.equal(blocks.tasks[blocks.places // size], ids)


HEADS = [
    # samples, positions, tasks, inputs, widest, total
    ("cpu", HeadsShape(1, 1, 20, 256, 10, 200), "gathered"),
    ("cpu", HeadsShape(64, 1, 100, 256, 10, 1000), "gathered"),
    ("cpu", HeadsShape(4096, 1, 1, 256, 10, 10), "together"),
    ("cpu", HeadsShape(4096, 1, 20, 256, 10, 200), "sorted"),
    ("cpu", HeadsShape(4096, 1, 1000, 256, 10, 10_000), "sorted"),
    ("cuda", HeadsShape(1, 1, 20, 256, 10, 200), "gathered"),
    ("cuda", HeadsShape(64, 1, 1, 256, 10, 10), "gathered"),
    ("cuda", HeadsShape(64, 1, 20, 256, 10, 200), "gathered"),
    ("cuda", HeadsShape(64, 1, 1000, 256, 10, 10_000), "gathered"),
    ("cuda", HeadsShape(4096, 1, 1, 256, 10, 10), "together"),
    ("cuda", HeadsShape(4096, 1, 20, 256, 10, 200), "together"),
    ("cuda", HeadsShape(4096, 1, 100, 256, 10, 1000), "gathered"),
    ("cuda", HeadsShape(4096, 1, 1000, 256, 10, 10_000), "gathered"),
    ("cuda", HeadsShape(4096, 1, 20, 512, 100, 2000), "sorted"),
    ("cuda", HeadsShape(4096, 1, 100, 512, 100, 10_000), "sorted"),
]


@pytest.mark.parametrize(("device", "shape", "way"), HEADS)
def test_way_to_heads_follows_from_shapes(device: str, shape: HeadsShape, way: str) -> None:
    assert heads_way(shape, device) == way


LAYERS: dict[str, tuple[Callable[[bool], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda bias: nn.Linear(4, 5, bias), (4,)),
    "linear over sequences": (lambda bias: nn.Linear(4, 5, bias), (6, 4)),
    "linear over grids": (lambda bias: nn.Linear(4, 5, bias), (2, 3, 4)),
    "conv": (lambda bias: nn.Conv2d(3, 4, 3, padding=1, bias=bias), (3, 6, 5)),
    "strided": (lambda bias: nn.Conv2d(3, 4, (3, 2), (2, 1), (1, 0), bias=bias), (3, 7, 5)),
    "dilated": (lambda bias: nn.Conv2d(3, 4, 3, padding="same", dilation=2, bias=bias), (3, 6, 6)),
    "reflected": (
        lambda bias: nn.Conv2d(3, 4, 3, 2, 1, bias=bias, padding_mode="reflect"),
        (3, 6, 6),
    ),
    "pointwise": (lambda bias: nn.Conv2d(3, 4, 1, bias=bias), (3, 6, 5)),
    "pointwise strided": (lambda bias: nn.Conv2d(3, 4, 1, (2, 3), bias=bias), (3, 6, 5)),
    "pointwise padded": (lambda bias: nn.Conv2d(3, 4, 1, 1, 1, bias=bias), (3, 6, 5)),
}


def factored(kind: str, bias: bool, base: str, tasks: int) -> FactoredLayer:
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    module = nn.Sequential(make(bias), nn.Flatten(), nn.LazyLinear(2)).to(F64)
    module(torch.zeros(1, *shape, dtype=F64))
    layer = rankup.grow(module, Rank(first=2, step=1), base=base).body[0]
    assert isinstance(layer, FactoredLayer)
    for task in range(tasks):
        sizes = layer.spec.shapes(Place.number(task), 2)
        layer.install(layer.extended({key: drawn(*size, seed=task) for key, size in sizes.items()}))
    return layer


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("base", ["new", "keep"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "tasks"), sampled([*LAYERS], [1, 4, 20]))
def test_every_way_through_layer_equals_one_task(
    kind: str, tasks: int, bias: bool, base: str
) -> None:
    layer = factored(kind, bias, base, tasks)
    for batch in (1, 9):
        x, ids = drawn(batch, *LAYERS[kind][1], seed=batch), spread(batch, tasks)
        expected = torch.cat(
            [layer.merged(task)(x[i : i + 1]) for i, task in enumerate(ids.tolist())]
        )
        with active(ids):
            assert relative_error(layer(x), expected) < 1e-9
        for way in (layer._mixed_by_hidden, layer._mixed_by_factors, layer._mixed_by_weights):
            found = way(x, ids, layer._tables())
            assert found.shape == expected.shape
            assert relative_error(found, expected) < 1e-9


PAPER = {"tasks": 20, "pointwise": False}
WAYS = [
    # The paper's ResNet18 after twenty tasks: the first stage, the third, the last, a shortcut.
    ("cpu", MixedShape(64, 1024, rank=21, inputs=180, outputs=20, **PAPER), "weights"),
    ("cpu", MixedShape(64, 64, rank=46, inputs=720, outputs=80, **PAPER), "hidden"),
    ("cpu", MixedShape(64, 16, rank=73, inputs=1440, outputs=160, **PAPER), "hidden"),
    ("cpu", MixedShape(64, 256, 20, 23, 20, 40, pointwise=True), "weights"),
    ("cuda", MixedShape(4096, 1024, rank=21, inputs=180, outputs=20, **PAPER), "factors"),
    ("cuda", MixedShape(4096, 64, rank=46, inputs=720, outputs=80, **PAPER), "hidden"),
    ("cuda", MixedShape(4096, 16, rank=73, inputs=1440, outputs=160, **PAPER), "hidden"),
    ("cuda", MixedShape(4096, 256, 20, 23, 20, 40, pointwise=True), "weights"),
    # For few samples of many tasks, building their weights does not pay off.
    ("cpu", MixedShape(2, 64, 100, 206, 720, 80, pointwise=False), "hidden"),
    # A sequence shorter than the layer is wide, and one far longer.
    ("cpu", MixedShape(32, 16, 20, 30, 256, 256, pointwise=True), "hidden"),
    ("cpu", MixedShape(32, 4096, 20, 30, 256, 256, pointwise=True), "factors"),
    ("cpu", MixedShape(0, 16, 20, 30, 256, 256, pointwise=False), "hidden"),
]


@pytest.mark.parametrize(("device", "shape", "way"), WAYS)
def test_way_through_layer_follows_from_shapes(device: str, shape: MixedShape, way: str) -> None:
    assert mixed_way(shape, device) == way


@pytest.mark.parametrize(
    ("kind", "base", "way"), sampled(KINDS, ["new", "keep"], ["hidden", "factors", "weights"])
)
def test_gradients_reach_inputs_of_mixed_batch(
    kind: str, base: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankup.layers.applied.mixed_way", lambda shape, device: way)
    net = taught(kind, tasks=(3, 3, 3), base=base, dtype=F64)
    x = inputs(kind, batch=5, seed=7, dtype=F64).requires_grad_()
    ids = torch.tensor([2, 0, 1, 1, 2])
    mixed = torch.autograd.grad(net(x, task=ids).square().sum(), x)[0]
    loop = sum(net(x[i : i + 1], task=t).square().sum() for i, t in enumerate(ids.tolist()))
    assert relative_error(mixed, torch.autograd.grad(loop, x)[0]) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_batch_runs_under_autocast_and_torch_func(kind: str) -> None:
    net = taught(kind, rank=RANKS["with seeded"])
    x, ids = inputs(kind, batch=4), torch.tensor([2, 0, 1, 2])
    there = net(x, task=ids) > -torch.inf
    expected = net(x, task=ids)
    with torch.autocast("cpu", torch.bfloat16):
        found = net(x, task=ids).float()
    torch.testing.assert_close(found[there], expected[there], rtol=0.1, atol=0.1)
    both = torch.func.vmap(lambda batch: net(batch, task=ids))(torch.stack([x + 1, x]))
    torch.testing.assert_close(both[1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_mixed_batch_gives_empty_answer(kind: str) -> None:
    net = taught(kind)
    assert net(inputs(kind)[:0], task=torch.empty(0, dtype=torch.long)).shape == (0, 4)


@pytest.mark.parametrize("shape", [(3,), (3, 4, 5), (3, 1, 1)])
@pytest.mark.parametrize("affine", [True, False])
def test_both_forms_of_batch_norm_are_same(affine: bool, shape: tuple[int, ...]) -> None:
    over: Any = "batch1d" if len(shape) == 1 else "batch2d"
    spec = NormSpec("norm", over, (3,), 1e-5, 1, weight=affine, bias=affine, shared=False)
    norm = TaskNorm(spec, 0, F64, torch.device("cpu"))
    for task in range(4):
        added = {
            key: drawn(*size, seed=task).exp()
            for key, size in spec.shapes(Place.number(task), 2).items()
        }
        norm.install(norm.extended(added))
    x, ids = drawn(6, *shape), spread(6, 4)
    expected = torch.cat([norm.merged(t)(x[i : i + 1]) for i, t in enumerate(ids.tolist())])
    with active(ids):
        torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(norm._mixed_batch_norm(x, ids), expected)
    if shape == (3, 4, 5):
        last = x.to(memory_format=torch.channels_last)
        found = norm._mixed_batch_norm(last, ids)
        assert found.stride() == last.stride()


@pytest.mark.parametrize("kind", ["resnet18", "convolutions"])
def test_order_of_dimensions_in_memory_does_not_matter(kind: str) -> None:
    net, ids = taught(kind, dtype=F64), torch.tensor([2, 0, 1, 1, 2, 0])
    x = inputs(kind, dtype=F64)
    found = net(x.to(memory_format=torch.channels_last), task=ids)
    torch.testing.assert_close(found, net(x, task=ids), rtol=1e-9, atol=1e-9)


class Operations(TorchDispatchMode):
    """Counts what torch is asked to compute."""

    # Views, and reading a number: mere bookkeeping.
    FREE = ("view", "t", "transpose", "slice", "select", "expand", "squeeze", "_local_scalar_dense")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in self.FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def test_mixed_batch_starts_few_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rankup.layers.head.heads_way", lambda shape, device: "together")
    net = taught("mlp", tasks=(3, 3, 3))
    x, ids = inputs("mlp"), torch.tensor([2, 0, 1, 1, 2, 0])
    net(x, task=ids)  # looks once whether samples come first
    with torch.no_grad(), Operations() as one:
        net(x, task=2)
    with torch.no_grad(), Operations() as mixed:
        net(x, task=ids)
    # Two gathers in each layer, of selectors and of biases, one in the head, and the look at the
    # indices.
    assert sum(mixed.counts.values()) <= sum(one.counts.values()) + 6


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_indices_may_be_of_any_whole_type(dtype: torch.dtype) -> None:
    net = taught("mlp")
    x, ids = inputs("mlp"), torch.tensor([2, 0, 1, 1, 2, 0])
    assert torch.equal(net(x, task=ids.to(dtype)), net(x, task=ids))


@pytest.mark.parametrize("given", [list, tuple, np.asarray])
def test_tasks_may_be_list_of_names_or_indices(given: Callable[[list[Any]], Any]) -> None:
    net, x = taught("mlp", tasks=[3, 2]), inputs("mlp")[:4]
    wanted = net(x, task=torch.tensor([0, 1, 1, 0]))
    one, two = net.tasks
    assert torch.equal(net(x, task=given([one, two, two, one])), wanted)
    assert torch.equal(net(x, task=given([0, 1, 1, 0])), wanted)
    with pytest.raises(rankup.RankupError, match="there is no task 'other'"):
        net(x, task=given([one, two, two, "other"]))
    with pytest.raises(rankup.RankupError, match="got 2 task indices for 4 samples"):
        net(x, task=given([0, 1]))


WRONG = {
    "too high": ([0, 3, 1], "task index 3 is out of range: the network has 3 tasks"),
    "negative": ([0, -1, 1], "task index -1 is out of range: the network has 3 tasks"),
    "both": ([7, 0, -2], "task index -2 is out of range: the network has 3 tasks"),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize(("ids", "message"), WRONG.values(), ids=WRONG)
def test_index_out_of_range_is_named_and_does_no_harm(
    ids: list[int], message: str, device: str
) -> None:
    net = taught("mlp").to(device)
    x, right = inputs("mlp", batch=3).to(device), torch.tensor([0, 2, 1], device=device)
    expected = net(x, task=right)
    for tasks in (torch.tensor(ids), torch.tensor(ids, device=device)):
        with pytest.raises(rankup.RankupError, match=message):
            net(x, task=tasks)
        assert torch.equal(net(x, task=right), expected)


@GPU
def test_task_being_learned_is_refused_on_gpu_too() -> None:
    net = taught("mlp").to("cuda")
    net.begin_task("open", 3)
    with pytest.raises(rankup.TaskStateError, match="still being learned"):
        net(inputs("mlp", batch=2).cuda(), task=torch.tensor([0, 3], device="cuda"))


@GPU
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_batch_on_gpu_equals_per_task_loop(kind: str) -> None:
    net = taught(kind, tasks=(3, 3, 3), dtype=F64).to("cuda")
    x, ids = inputs(kind, batch=9, dtype=F64).cuda(), spread(9, 3).cuda()
    loop = torch.cat([net(x[i : i + 1], task=t) for i, t in enumerate(ids.tolist())])
    assert relative_error(net(x, task=ids), loop) < 1e-9


@GPU
@pytest.mark.parametrize("kind", KINDS)
def test_captured_mixed_batch_follows_its_indices(kind: str) -> None:
    net = taught(kind, tasks=(3, 2, 4)).to("cuda")
    x, ids = inputs(kind, batch=9).cuda(), spread(9, 3).cuda()
    others = spread(9, 3, seed=1).cuda()
    with torch.no_grad():
        expected = [net(x, task=tasks) for tasks in (ids, others)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            net(x, task=ids)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = net(x, task=ids)
        for tasks, wanted in zip((ids.clone(), others), expected, strict=True):
            ids.copy_(tasks)
            graph.replay()
            torch.testing.assert_close(answer, wanted, rtol=1e-3, atol=1e-3)
