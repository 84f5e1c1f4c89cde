"""A factored layer computes what an explicit `U diag(s) Vᵀ` does, for one task and for many."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rankup
from helpers.zoo import inputs, relative_error, taught, teach
from rankup.layers import (
    CONVOLUTIONS,
    FactoredLayer,
    FactoredLinear,
    TaskLayer,
    active,
    dense_is_cheaper,
)
from rankup.layers.precomputed import projected
from rankup.rank import Place, Rank

F64 = torch.float64


def layer_of(module: nn.Module, rank: Rank, **grow: object) -> FactoredLayer:
    """The first factored layer of a network with that module in front."""
    # What follows only completes the network: a head, and something to make it fit.
    body = nn.Sequential(module, nn.Flatten(), nn.LazyLinear(2)).to(F64)
    body(input_for(module, 1))
    net = rankup.grow(body, rank, **grow)
    layer = net.body[0]
    assert isinstance(layer, FactoredLayer)
    return layer


def learn(layer: FactoredLayer, task: int) -> None:
    """Commit a task with random values in it."""
    draw = torch.Generator().manual_seed(task)
    shapes = layer.spec.shapes(Place.number(task), 2)
    layer.install(
        layer.extended({k: torch.randn(s, generator=draw, dtype=F64) for k, s in shapes.items()})
    )


def explicit(layer: FactoredLayer, task: int, x: Tensor, plain: nn.Module) -> Tensor:
    """The layer's definition, written out: one rank-1 matrix after another."""
    weight = torch.zeros(layer.spec.outputs, layer.spec.inputs, dtype=F64)
    if layer.base_weight is not None:
        weight += layer.base_weight
    for i in range(layer.spec.rank.used(Place.number(task))):
        weight += layer.S[task, i] * torch.outer(layer.U[i], layer.V[i])
    bias = layer.B[task] if layer.spec.bias else None
    if isinstance(plain, CONVOLUTIONS):
        return plain._conv_forward(x, weight.view_as(plain.weight), bias)
    return F.linear(x, weight, bias)


@st.composite
def convolutions(draw: st.DrawFn) -> nn.Module:
    torch.manual_seed(0)
    kind = draw(st.sampled_from(CONVOLUTIONS))

    def sizes(least: int, most: int) -> tuple[int, ...]:
        dims = CONVOLUTIONS.index(kind) + 1
        return draw(st.tuples(*(st.integers(least, most) for _ in range(dims))))

    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    kernel, stride, padding, dilation = sizes(1, 3), sizes(1, 2), sizes(0, 2), sizes(1, 2)
    padded = draw(st.sampled_from(["by numbers", "valid", "same"]))
    if padded == "same":
        stride = 1
    return kind(
        3,
        draw(st.integers(1, 5)),
        kernel,
        stride,
        padding if padded == "by numbers" else padded,
        dilation,
        bias=draw(st.booleans()),
        padding_mode=mode,
        dtype=F64,
    )


@st.composite
def linears(draw: st.DrawFn) -> nn.Linear:
    torch.manual_seed(0)
    sizes = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    return nn.Linear(*sizes, bias=draw(st.booleans()), dtype=F64)


def input_for(module: nn.Module, batch: int, between: tuple[int, ...] = ()) -> Tensor:
    if isinstance(module, CONVOLUTIONS):
        shape = 3, *[9] * (CONVOLUTIONS.index(type(module)) + 1)
    else:
        shape = *between, module.in_features
    draw = torch.Generator().manual_seed(batch)
    return torch.randn(batch, *shape, generator=draw, dtype=F64)


ranks = st.builds(
    Rank, first=st.integers(1, 3), step=st.integers(0, 2), seeded=st.sampled_from([0, 1, 5, "2x"])
) | st.builds(Rank, first=st.just(0), step=st.integers(0, 1), seeded=st.sampled_from([4, "3x"]))


@pytest.mark.filterwarnings("ignore:one task cannot add more rank", "ignore:Using padding='same'")
@settings(max_examples=30, deadline=None)
@given(
    module=convolutions() | linears(),
    rank=ranks,
    base=st.sampled_from(["new", "keep"]),
    tasks=st.integers(1, 4),
    batch=st.integers(1, 5),
    between=st.sampled_from([(), (3,), (2, 2)]),
)
def test_every_form_equals_explicit_sum_of_factors(
    module: nn.Module, rank: Rank, base: str, tasks: int, batch: int, between: tuple[int, ...]
) -> None:
    layer = layer_of(module, rank, base=base)
    for task in range(tasks):
        learn(layer, task)
    x = input_for(module, batch, between)
    expected = [explicit(layer, task, x, module) for task in range(tasks)]
    for task in range(tasks):
        with active(task):
            found = layer(x)
        blocks = layer._blocks(task)
        bias = layer._per_channel(layer.B[task]) if layer.spec.bias else 0
        factored = layer._factored(x, blocks) + bias
        dense = layer._map(x, layer._dense(blocks)) + bias
        merged = layer.merged(task)(x)
        for form in (found, factored, dense, merged):
            assert relative_error(form, expected[task]) < 1e-10
    ids = torch.arange(batch) % tasks
    with active(ids):
        mixed = layer(x)
    loop = torch.stack([expected[task][i] for i, task in enumerate(ids.tolist())])
    assert relative_error(mixed, loop) < 1e-12


@pytest.mark.parametrize("seeded", [0, 6])
@pytest.mark.parametrize("base", ["new", "keep"])
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize(
    "module",
    [nn.Linear(4, 5), *(kind(3, 4, 3, stride=2, padding=1) for kind in CONVOLUTIONS)],
    ids=["linear", "conv1d", "conv2d", "conv3d"],
)
def test_gradients_equal_those_of_explicit_sum(
    module: nn.Module, batch: int, base: str, seeded: int
) -> None:
    module = module.to(F64)
    layer = layer_of(module, Rank(first=2, step=2, seeded=seeded), base=base)
    learn(layer, 0)
    draw = torch.Generator().manual_seed(5)
    shapes = layer.spec.shapes(Place.number(1), 2)
    values = {k: torch.randn(s, generator=draw, dtype=F64) for k, s in shapes.items()}
    x = input_for(module, batch)

    layer.open({key: value.clone() for key, value in values.items()})
    with active(1):
        output = layer(x)
    upstream = torch.randn(output.shape, generator=draw, dtype=F64)
    output.backward(upstream)

    own = {key: value.clone().requires_grad_() for key, value in values.items()}
    U, V = torch.cat([layer.U, own["U"]]), torch.cat([layer.V, own["V"]])
    weight = U.t() @ torch.diag(own["selector"]) @ V
    if layer.base_weight is not None:
        weight = weight + layer.base_weight
    if isinstance(module, CONVOLUTIONS):
        expected = module._conv_forward(x, weight.view_as(module.weight), own["bias"])
    else:
        expected = F.linear(x, weight, own["bias"])
    expected.backward(upstream)

    assert relative_error(output, expected) < 1e-10
    assert {key for key, _ in layer.named_parameters()} == {f"new_{key}" for key in own}
    for key, reference in own.items():
        found = getattr(layer, f"new_{key}").grad
        assert relative_error(found, reference.grad) < 1e-10, key


def test_which_form_runs_follows_from_shapes_and_own_rank() -> None:
    assert not dense_is_cheaper(positions=128, rank=20, inputs=784, outputs=256)
    assert dense_is_cheaper(positions=4096, rank=1536, inputs=784, outputs=256)
    # Building W costs rank · in · out, which a small batch does not earn back.
    assert not dense_is_cheaper(positions=8, rank=1536, inputs=784, outputs=256)
    # A kept weight is applied besides the factors, or is a part of W.
    assert dense_is_cheaper(positions=512, rank=8, inputs=256, outputs=1024, kept=True)
    assert not dense_is_cheaper(positions=16, rank=8, inputs=256, outputs=1024, kept=True)


@pytest.mark.parametrize("added", [1, 3])
def test_new_factors_and_heads_start_orthogonal_with_selector_one(added: int) -> None:
    net = rankup.grow(rankup.models.mlp(9, hidden=[8, 7]).to(F64), Rank(first=3, step=added))
    for task in range(2):
        net.begin_task(f"{task}", 5)
        for layer in net.body.hidden:
            own = 3 if task == 0 else added
            for factor in (layer.new_U, layer.new_V):
                torch.testing.assert_close(factor @ factor.t(), torch.eye(own, dtype=F64))
            assert layer.new_selector[:-own].tolist() == [0] * (
                layer.spec.rank.used(Place.number(task)) - own
            )
            assert layer.new_selector[-own:].tolist() == [1] * own
            assert not layer.new_bias.any()
        head = net.body.head.new_weight
        torch.testing.assert_close(head @ head.t(), torch.eye(5, dtype=F64))
        net.commit_task()


@pytest.mark.parametrize("start", [0.0, 0.3, "previous", "halfway"])
@pytest.mark.parametrize("seeded", [0, 50])
def test_where_selectors_start(start: float | str, seeded: int) -> None:
    net = rankup.grow(rankup.models.mlp(9, hidden=[8]), Rank(first=2, step=1, seeded=seeded))
    layer = net.body.hidden[0]
    net.begin_task("one", 2)
    with torch.no_grad():
        layer.new_selector.add_(torch.randn(2 + seeded))
    net.commit_task()
    net.begin_task("two", 2, selectors=start)
    previous, selector = layer.S[0], layer.new_selector
    if isinstance(start, str):
        assert torch.equal(selector[:seeded], previous[:seeded])
        share = 0.5 if start == "halfway" else 1.0
        assert torch.equal(selector[seeded : seeded + 2], share * previous[seeded:])
    else:
        assert selector[seeded : seeded + 2].tolist() == pytest.approx([start, start])
        assert not torch.equal(selector[:seeded], previous[:seeded]) or not seeded
    assert selector[-1] == 1


@pytest.mark.parametrize(("uses", "expected"), [("all", [3, 2, 1.5]), (["a", "b"], [2, 1])])
def test_halfway_is_of_the_last_task_alone(uses: str | list[str], expected: list[float]) -> None:
    net = rankup.grow(rankup.models.mlp(9, hidden=[8]), Rank(first=1, step=1))
    layer = net.body.hidden[0]
    for number, name in enumerate("abc"):
        net.begin_task(name, 2)
        with torch.no_grad():
            layer.new_selector.copy_(torch.tensor([[1], [2, 2], [3, 2, 3]][number]))
        net.commit_task()
    net.begin_task("open", 2, uses=uses, selectors="halfway")
    assert layer.new_selector.tolist() == [*expected, 1]


@pytest.mark.parametrize(("norm", "gain"), [(None, 2), (nn.BatchNorm1d(400), 1)])
def test_seeded_selectors_give_weights_usual_scale(norm: nn.Module | None, gain: int) -> None:
    inputs, outputs, seeded = 300, 400, 2000
    between = [norm] if norm else []
    module = nn.Sequential(nn.Linear(inputs, outputs), *between, nn.ReLU(), nn.Linear(outputs, 2))
    net = rankup.grow(module, Rank(first=0, step=0, seeded=seeded))
    net.begin_task("a", 2)
    selector = net.body[0].new_selector
    assert float(selector.detach().std()) == pytest.approx(
        (gain * outputs / seeded) ** 0.5, rel=0.1
    )
    variance = float(net.body[0].matrix(0).detach().var())
    assert variance == pytest.approx(gain / inputs, rel=0.1)


@pytest.mark.parametrize("seeded", [0, 6])
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("between", [(), (3,)])
def test_fast_form_of_learning_equals_plain_one(
    seeded: int, step: int, bias: bool, cached: bool, between: tuple[int, ...]
) -> None:
    module = nn.Linear(40, 30, bias=bias, dtype=F64)
    layer = layer_of(module, Rank(first=2, step=step, seeded=seeded))
    assert isinstance(layer, FactoredLinear)
    learn(layer, 0)
    draw = torch.Generator().manual_seed(5)
    shapes = layer.spec.shapes(Place.number(1), 2)
    layer.open({k: torch.randn(s, generator=draw, dtype=F64) for k, s in shapes.items()})
    x = torch.randn(7, *between, 40, generator=draw, dtype=F64, requires_grad=not cached)
    seen = layer.project(x.detach().reshape(-1, 40))
    with active(1), projected(layer.spec.name, seen) if cached else nullcontext():
        assert cached or layer._takes_node(x, layer.spec.rank.used(Place.number(1)), None)
        fast = layer(x)
    plain = layer._of_one_task(x, 1)
    assert relative_error(layer._projected_by_autograd(x, seen), plain) < 1e-12
    upstream = torch.randn(fast.shape, generator=draw, dtype=F64)
    wanted = [*layer.parameters()] if cached else [x, *layer.parameters()]
    found = torch.autograd.grad(fast, wanted, upstream)
    expected = torch.autograd.grad(plain, wanted, upstream)
    assert relative_error(fast, plain) < 1e-12
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 1e-12


@pytest.mark.parametrize("kind", ["transformer", "convolutions"])
def test_commit_exchanges_all_tables_of_layer_at_once(kind: str) -> None:
    net = taught(kind)
    layers = [part for part in net.parts if isinstance(part, TaskLayer)]
    # Another thread that has begun to read continues with what it has.
    begun = [layer._buffers for layer in layers]
    before = [dict(buffers) for buffers in begun]
    teach(net, "next", inputs(kind))
    for layer, buffers, old in zip(layers, begun, before, strict=True):
        assert all(buffers[name] is table for name, table in old.items())
        assert any(layer._buffers[name] is not table for name, table in old.items())


@pytest.mark.parametrize("samples", [1, 31, 32, 200])
@pytest.mark.parametrize("base", ["new", "keep"])
@pytest.mark.parametrize("bias", [True, False])
def test_answers_of_few_and_many_samples_are_those_of_matrix(
    samples: int, base: Any, bias: bool
) -> None:
    module = nn.Sequential(nn.Linear(300, 200, bias=bias), nn.ReLU(), nn.Linear(200, 3))
    net, x = rankup.grow(module, rankup.Rank(5, 2), base=base), torch.randn(samples, 300)

    def learn(name: str) -> None:
        net.begin_task(name, 3, selectors=0.5)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        net.commit_task()

    for name in ("a", "b", "c"):
        learn(name)
    layer: Any = net.body.get_submodule("0")
    with active(1):
        found = layer(x)
    exact = x.double() @ layer.matrix(1).double().t() + (layer.B[1].double() if bias else 0)
    assert relative_error(found, exact) < 1e-5
    learn("d")
    with active(1):
        assert torch.equal(layer(x), found)
