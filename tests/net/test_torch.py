"""A grown network is a module like any other: torch's own tools work on it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import rankup
from helpers.zoo import GPU, KINDS, RANKS, assert_same_bits, inputs, logits, module, taught, teach
from rankup.rank import Rank


def test_step_is_pure_function_of_parameters_and_buffers() -> None:
    net = rankup.grow(module("resnet18"), Rank(2, 1))
    x = inputs("resnet18")
    teach(net, "a", x)
    teach(net, "b", x, commit=False)
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    own = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    for _ in range(2):
        called = torch.func.functional_call(net, own, (x,), {"task": "b"})
        assert all(torch.equal(state[key], value) for key, value in net.state_dict().items())
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(own[name])
    assert torch.equal(net(x, task="b"), called)


# As torch says of its own RMSNorm.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("kind", KINDS)
def test_task_can_be_learned_under_autocast(kind: str) -> None:
    net = rankup.grow(module(kind), Rank(2, 1, seeded=3))
    x = inputs(kind)
    for task in ("a", "b"):
        net.begin_task(task, 3)
        with torch.autocast("cpu", torch.bfloat16):
            net(x, task=task).float().square().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in net.parameters())
        with torch.autocast("cpu", torch.bfloat16):
            net.commit_task([x])
        assert torch.isfinite(net(x, task=task)).all()


def test_gradients_under_torch_func_are_those_of_autograd() -> None:
    net = rankup.grow(module("mlp", torch.float64), Rank(2, 1))
    x = inputs("mlp", dtype=torch.float64)
    teach(net, "a", x)
    teach(net, "b", x, commit=False)
    own = {name: p.detach() for name, p in net.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        answer = torch.func.functional_call(net, parameters, (x,), {"task": 1})
        return answer.square().sum()

    found = torch.func.grad(loss)(own, x)
    expected = torch.autograd.grad(net(x, task="b").square().sum(), list(net.parameters()))
    for one, other in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(one, other)
    # Two replicas at once, each with its own weights and batch.
    stacked = {name: torch.stack([p, p * 0.5]) for name, p in own.items()}
    both = torch.func.vmap(torch.func.grad(loss))(stacked, torch.stack([x, x + 1]))
    alone = torch.func.grad(loss)({name: p * 0.5 for name, p in own.items()}, x + 1)
    for name, gradient in alone.items():
        torch.testing.assert_close(both[name][1], gradient)


@GPU
@pytest.mark.parametrize("kind", KINDS)
def test_bits_survive_way_to_gpu_and_back(kind: str, tmp_path: Path) -> None:
    net = taught(kind, rank=RANKS["with seeded"])
    x = inputs(kind, batch=9)
    before = logits(net, x)
    net.to("cuda")
    on_gpu = logits(net, x.cuda())
    for index in range(10):
        teach(net.train(), f"on the gpu {index}", x.cuda(), classes=2 + index)
        assert_same_bits(on_gpu, logits(net.eval(), x.cuda()))
    mixed = net(x.cuda(), task=torch.zeros(9, dtype=torch.long))
    torch.testing.assert_close(mixed[:, :3], on_gpu[0], rtol=1e-3, atol=1e-3)
    rankup.save(net, tmp_path / "net")
    loaded = rankup.load(tmp_path / "net", module(kind).cuda()).eval()
    assert loaded.device.type == "cuda"
    assert_same_bits(logits(net, x.cuda()), logits(loaded, x.cuda()))
    assert_same_bits(before, logits(net.to("cpu"), x))


@pytest.mark.filterwarnings("ignore")  # what the compiler says about itself
def test_compiled_network_answers_and_learns_same() -> None:
    net = taught("mlp")
    x = inputs("mlp")
    compiled = torch.compile(net, backend="eager")
    torch.testing.assert_close(compiled(x, task="task 1"), net(x, task="task 1"))
    net.begin_task("open", 3)
    found = torch.autograd.grad(compiled(x, task="open").square().sum(), list(net.parameters()))
    expected = torch.autograd.grad(net(x, task="open").square().sum(), list(net.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("default", ["dtype", "device"])
def test_torchs_defaults_change_nothing(default: str) -> None:
    def taught() -> Tensor:
        with torch.device("cpu"):
            body = rankup.models.mlp(64, hidden=[16]).float()
        net = rankup.grow(body, rankup.Rank(2, 1, seeded=32))
        for task in rankup.data.make_stream("r-digits", tasks=2):
            rankup.fit(net, task, rankup.Recipe(epochs=2))
        answer: Tensor = net.eval()(rankup.data.to_float(task.test_x), 1)
        return answer

    usual = taught()
    before = torch.get_default_dtype()
    try:
        if default == "dtype":
            torch.set_default_dtype(torch.float64)
            assert torch.equal(taught(), usual)
        else:  # tensors made there have no values
            with torch.device("meta"):
                assert torch.equal(taught(), usual)
    finally:
        torch.set_default_dtype(before)


def test_convolutions_in_double_precision_run_under_autocast() -> None:
    net = rankup.grow(module("convolutions", torch.float64), Rank(2, 1))
    net.begin_task("a", classes=3)
    x = inputs("convolutions", dtype=torch.float64)
    net.commit_task(calibrate=[x])
    net.eval()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(net(x, "a"), net.merged("a")(x), rtol=0.1, atol=0.1)
