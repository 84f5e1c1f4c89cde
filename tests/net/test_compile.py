"""Networks under torch.compile: one graph without breaks, few recompilations, the same answers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import rankup
from helpers.zoo import KINDS, inputs, taught
from rankup.rank import Rank

pytestmark = pytest.mark.filterwarnings("ignore")  # what the compiler says about itself


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


@pytest.mark.parametrize("kind", KINDS)
def test_network_is_one_graph_for_each_task(kind: str) -> None:
    net = taught(kind)
    run = compiled(net)
    for batch in (4, 6, 9, 5):
        for task in ("task 0", "task 1"):
            x = inputs(kind, batch=batch)
            torch.testing.assert_close(run(x, task=task), net(x, task=task), rtol=1e-4, atol=1e-4)
    assert graphs() <= 4  # of each task, one for the first size and one for any other


@pytest.mark.parametrize("kind", KINDS)
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
