"""Networks under torch.compile: one graph without breaks, few recompilations, the same answers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func

import rankup
from helpers.zoo import KINDS, inputs, taught
from rankup.rank import Rank
from rankup.training.batches import Feed
from rankup.training.engine.eager import Eager
from rankup.training.engine.rank import RankLearner

pytestmark = pytest.mark.filterwarnings("ignore")  # what the compiler says about itself


def sample(*sampled: str) -> list[Any]:
    """All kinds of networks. Tracing takes long, so that all but a sample are slow."""
    return [pytest.param(k, marks=() if k in sampled else pytest.mark.slow) for k in KINDS]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def compiled(net: nn.Module) -> nn.Module:
    whole: nn.Module = torch.compile(net, fullgraph=True, backend="eager")
    return whole


@pytest.mark.parametrize("kind", sample("mlp", "convolutions"))
def test_network_is_one_graph_for_each_task(kind: str) -> None:
    net = taught(kind)
    run = compiled(net)
    for batch in (4, 6, 9, 5):
        for task in ("task 0", "task 1"):
            x = inputs(kind, batch=batch)
            torch.testing.assert_close(run(x, task=task), net(x, task=task), rtol=1e-4, atol=1e-4)
    assert graphs() <= 4  # of each task, one for the first size and one for any other


@pytest.mark.parametrize("kind", sample("mlp", "transformer"))
def test_mixed_network_is_one_graph_for_all_tasks(kind: str) -> None:
    net = taught(kind)
    run = compiled(net)
    for batch in (4, 6, 9, 5):
        x, tasks = inputs(kind, batch=batch), torch.arange(batch) % 3
        for order in (tasks, tasks.flip(0), torch.zeros_like(tasks)):
            expected = net(x, task=order)
            torch.testing.assert_close(run(x, task=order), expected, rtol=1e-4, atol=1e-4)
    assert graphs() <= 2


class Folding(nn.Module):
    """Folds positions into the batch, as window attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        folded = self.hidden(x.reshape(-1, 2, 4)).relu()
        logits: Tensor = self.head(folded.view(len(x), -1, 8).mean(1))
        return logits


def folding() -> rankup.IncrementalNet:
    net = rankup.grow(Folding(), Rank(2, 1), head="head")
    for task, classes in (("a", 3), ("b", 5)):
        net.begin_task(task, classes)
        net.commit_task()
    return net.eval()


def test_compiled_module_that_folds_its_batch_runs_every_task() -> None:
    net = folding()
    run = compiled(net)
    for batch in (3, 6):
        x, tasks = torch.randn(batch, 8, 4), torch.arange(batch) % 2
        torch.testing.assert_close(run(x, task=tasks), net(x, task=tasks))


def test_compiled_network_learns_same() -> None:
    net = taught("transformer")
    net.begin_task("open", 3)
    run, x = compiled(net), inputs("transformer")
    found = torch.autograd.grad(run(x, task="open").square().sum(), list(net.parameters()))
    expected = torch.autograd.grad(net(x, task="open").square().sum(), list(net.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_compiled_network_refuses_unknown_index() -> None:
    net = taught("mlp")
    with pytest.raises((RuntimeError, IndexError)):
        compiled(net)(inputs("mlp", batch=2), task=torch.tensor([0, 3]))


def test_threads_share_compiled_network() -> None:
    net = taught("mlp")
    run, x = compiled(net), inputs("mlp", batch=6)
    expected = [net(x, task=task) for task in range(3)]
    for task in range(3):
        run(x, task=task)

    def answer(task: int) -> None:
        for _ in range(50):
            torch.testing.assert_close(run(x, task=task), expected[task])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(answer, range(3)))


class OwnNorm(nn.LayerNorm):
    """As timm writes its own: it reads a task's vectors in place of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def test_compiled_network_learns_task_after_task_without_compiling_again() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 24), OwnNorm(24), nn.GELU(), nn.Linear(24, 3))
    net = rankup.grow(module, Rank(1, 1), base="keep")  # few enough to stay factors
    run, x, counts = compiled(net), torch.randn(6, 5, 16), []
    for number in range(8):
        net.begin_task(f"task {number}", 3 + number % 2)
        for name in (f"task {number}", number):  # called by name and by index
            run(x, task=name).square().mean().backward()
        counts.append(graphs())
        found = [parameter.grad for parameter in net.parameters()]
        net.zero_grad()
        for _ in range(2):
            net(x, task=number).square().mean().backward()
        for one, parameter in zip(found, net.parameters(), strict=True):
            torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-5)
        net.commit_task()
    assert counts[-1] == counts[2] <= 3


def test_learner_compiles_its_module_once_for_tasks_of_other_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    as_usual = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: as_usual(f, backend="eager", fullgraph=True))
    module = nn.Sequential(nn.Linear(16, 24), OwnNorm(24), nn.GELU(), nn.Linear(24, 3))
    net = rankup.grow(module, Rank(2, 2), base="keep")
    x, y, counts = torch.randn(12, 16), torch.arange(12) % 3, []
    recipe = rankup.Recipe(batch=6, epochs=1, precision="bfloat16")
    for number in range(5):
        net.begin_task(f"task {number}", 3)
        task = rankup.data.Task(f"task {number}", 3, x, y, x, y)
        learner = RankLearner(net, Feed(task, recipe, net.device, net.dtype), pad=64)
        steps = Eager([learner])
        draws = learner.sample_epoch(torch.Generator().manual_seed(0))
        draw = {name: entries[0] for name, entries in draws.items()}
        with learner.bound(steps.tensors[0]):
            loss, expected = learner.gradient(draw)
            learner.compile_module()
            again, found = learner.gradient(draw)
        counts.append(graphs())
        torch.testing.assert_close(again, loss, rtol=2e-2, atol=2e-2)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)
        net.commit_task()
    assert counts[-1] == counts[1] == 2


def learning_beside_kept_weight() -> tuple[rankup.IncrementalNet, Tensor]:
    """Of its twelve factors a hidden layer learns two."""
    layers = nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 3)
    net = rankup.grow(nn.Sequential(*layers), Rank(10, 2), base="keep")
    net.begin_task("old", 3)
    net.commit_task()
    net.train().begin_task("new", 3)
    return net, torch.randn(40, 6, generator=torch.Generator().manual_seed(0))


def test_compiled_step_multiplies_for_gradients_of_new_factors_alone() -> None:
    net, x = learning_beside_kept_weight()
    rows: list[int] = []

    def noted(graph: Any, _: Any) -> Any:
        products = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        rows.extend(product.meta["val"].shape[0] for product in products)
        return make_boxed_func(graph.forward)

    step = torch.compile(net, backend=aot_autograd(fw_compiler=lambda g, _: g, bw_compiler=noted))
    step(x, task="new").square().mean().backward()
    assert rows
    assert 2 in rows
    assert 12 not in rows


def test_compiled_transform_gives_its_gradients() -> None:
    net, x = learning_beside_kept_weight()
    learned = {key: parameter.detach() for key, parameter in net.named_parameters()}

    def loss(learned: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, learned, (x,), {"task": "new"}).square().mean()

    expected = torch.func.grad(loss)(learned)
    found = torch.compile(torch.func.grad(loss), backend="aot_eager")(learned)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-5)
