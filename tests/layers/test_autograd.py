"""The single autograd node that a task being learned runs has all the derivatives of the same
computation in torch's own operations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import rankup
from helpers.zoo import inputs, module, relative_error, teach
from rankup.layers.autograd import FactoredMap, KeptMap, kept_map
from rankup.layers.dispatch import merging_is_cheaper
from rankup.rank import Rank

F64 = torch.float64


def learning() -> tuple[rankup.IncrementalNet, Tensor]:
    """A network in the middle of its second task, and inputs for it."""
    net = rankup.grow(module("mlp", F64), Rank(2, 1))
    x = inputs("mlp", dtype=F64)
    teach(net, "a", x)
    teach(net, "b", x, commit=False, selectors=0.3)
    return net, x


@pytest.mark.parametrize(("old", "new"), [(3, 2), (3, 0), (0, 2)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cached", [True, False])
def test_node_has_second_derivatives(old: int, new: int, bias: bool, cached: bool) -> None:
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int, learned: bool = True) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=F64, requires_grad=learned)

    old_U, old_V = drawn(old, 4, learned=False), drawn(old, 5, learned=False)
    x = drawn(3, 5, learned=not cached)
    seen = x @ old_V.t() if cached else None
    learned = {
        "selector": drawn(old + new),
        "U": drawn(new, 4) if new else None,
        "V": drawn(new, 5) if new else None,
        "bias": drawn(4) if bias else None,
    }
    keys = [key for key, value in learned.items() if value is not None]

    def node(x: Tensor, *given: Tensor) -> Tensor:
        values = {**learned, **dict(zip(keys, given, strict=True))}
        return FactoredMap.apply(x, *values.values(), old_U, old_V, seen)

    given = [learned[key] for key in keys]
    assert torch.autograd.gradcheck(node, (x, *given))
    assert torch.autograd.gradgradcheck(node, (x, *given))


@pytest.mark.parametrize("name", ["hvp", "vhp"])
def test_products_with_hessian_are_those_of_torch_func(name: str) -> None:
    net, x = learning()
    product: Callable[..., Any] = getattr(torch.autograd.functional, name)

    def loss(v: Tensor) -> Tensor:
        return net(v, task="b").square().sum()

    hessian = jacrev(jacrev(loss))(x).view(x.numel(), x.numel())
    found = product(loss, x, x.cos())[1]
    assert hessian.norm() > 0.1
    assert relative_error(found.flatten(), hessian @ x.cos().flatten()) < 1e-9
    whole = torch.autograd.functional.hessian(loss, x)
    assert relative_error(whole.view_as(hessian), hessian) < 1e-9


def test_derivative_along_direction_is_that_of_torch_func() -> None:
    net, x = learning()
    found = torch.autograd.functional.jvp(lambda v: net(v, task="b"), x, x.cos())[1]
    jacobian = jacrev(lambda v: net(v, task="b"))(x).view(found.numel(), x.numel())
    assert relative_error(found.flatten(), jacobian @ x.cos().flatten()) < 1e-9


def test_task_learns_under_penalty_on_its_gradient() -> None:
    net, x = learning()

    def penalty(own: dict[str, Tensor], x: Tensor) -> Tensor:
        def loss(v: Tensor) -> Tensor:
            return functional_call(net, own, (v,), {"task": 1}).square().sum()

        return torch.func.grad(loss)(x).square().sum()

    expected = torch.func.grad(penalty)({name: p.detach() for name, p in net.named_parameters()}, x)
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net(x, task="b").square().sum(), x, create_graph=True)
    found = torch.autograd.grad(slope.square().sum(), list(net.parameters()))
    for gradient, (name, wanted) in zip(found, expected.items(), strict=True):
        assert relative_error(gradient, wanted) < 1e-9, name


def test_frozen_tensors_leave_other_gradients_alone() -> None:
    net, x = learning()
    named = dict(net.named_parameters())

    def gradients() -> dict[str, Tensor]:
        net.zero_grad()
        net(x, task="b").square().sum().backward()
        return {name: p.grad for name, p in named.items() if p.grad is not None}

    expected = gradients()
    assert expected.keys() == named.keys()
    for name, parameter in named.items():
        parameter.requires_grad_(False)
        found = gradients()
        parameter.requires_grad_(True)
        assert found.keys() == named.keys() - {name}
        assert all(torch.equal(gradient, expected[key]) for key, gradient in found.items())


@pytest.mark.parametrize(("old", "new"), [(3, 2), (3, 0), (0, 2)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("merges", [True, False])
def test_node_beside_kept_weight_has_second_derivatives(
    old: int, new: int, bias: bool, merges: bool
) -> None:
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int, learned: bool = True) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=F64, requires_grad=learned)

    frozen = drawn(old, 4, learned=False), drawn(old, 5, learned=False), drawn(4, 5, learned=False)
    x, learned = drawn(3, 5), {"selector": drawn(old + new), "U": None, "V": None, "bias": None}
    learned |= {"U": drawn(new, 4), "V": drawn(new, 5)} if new else {}
    learned |= {"bias": drawn(4)} if bias else {}
    keys = [key for key, value in learned.items() if value is not None]

    def run(by: Callable[..., Tensor], x: Tensor, *given: Tensor) -> Tensor:
        values = {**learned, **dict(zip(keys, given, strict=True))}
        return by(x, *values.values(), *frozen)

    def by_node(*given: Tensor | None) -> Tensor:
        return KeptMap.apply(*given, merges)

    given = [x, *(learned[key] for key in keys)]
    assert torch.autograd.gradcheck(lambda *given: run(by_node, *given), given)
    assert torch.autograd.gradgradcheck(lambda *given: run(by_node, *given), given)
    node, plain = run(by_node, *given), run(kept_map, *given)
    assert relative_error(node, plain) < 1e-12
    upstream = torch.randn(node.shape, generator=draw, dtype=F64)
    pairs = (torch.autograd.grad(y, given, upstream) for y in (node, plain))
    for one, other in zip(*pairs, strict=True):
        assert relative_error(one, other) < 1e-12


@pytest.mark.parametrize(("rows", "merges"), [(12, True), (9, False)])
def test_kept_layer_learns_in_autocast_dtype_with_gradients_in_full_one(
    rows: int, merges: bool
) -> None:
    torch.manual_seed(0)
    net = rankup.grow(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), Rank(2, 1), base="keep")
    teach(net, "a", torch.randn(rows, 6))
    net.begin_task("b", 3)
    layer, saved = net.body[0], []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        x = torch.randn(rows, 6)
        y = net(x, task="b")
    assert y.dtype == torch.bfloat16
    weight = layer.base_weight
    assert merging_is_cheaper(rows, 6, 8) is merges
    hidden = [t for t in saved if t.shape == (rows, 3)]
    assert len(hidden) == (not merges)
    # The base is kept as it is, not once more in the other dtype or merged.
    assert any(t.untyped_storage().data_ptr() == weight.data_ptr() for t in saved)
    assert not any(t.shape == weight.shape and t.dtype != weight.dtype for t in saved)
    y.float().square().sum().backward()
    half = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad()
    net(x, task="b").square().sum().backward()
    for name, parameter in net.named_parameters():
        found = half[name]
        assert found is not None
        assert found.dtype == torch.float32
        assert relative_error(found, parameter.grad) < 0.05
