"""What a network refuses gets one clear sentence, and nothing is lost."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.zoo import assert_same_bits, inputs, logits, taught, teach
from rankup.rank import Rank

Net = rankup.IncrementalNet
X = inputs("mlp")


def learning() -> Net:
    net = taught("mlp")
    teach(net, "open", X, commit=False)
    return net


def with_nan() -> Net:
    net = learning()
    with torch.no_grad():
        net.body.hidden[1].new_selector[0] = torch.nan
    return net


def ids(*values: float) -> Tensor:
    return torch.tensor(values)


def six(value: int) -> Tensor:
    return torch.full((6,), value)


REFUSED: dict[str, tuple[Callable[[], Net], Callable[[Net], object], str]] = {
    "begin twice": (
        learning,
        lambda net: net.begin_task("b", 2),
        "cannot begin task 'b' while 'open' is being learned",
    ),
    "commit without begin": (
        lambda: taught("mlp"),
        lambda net: net.commit_task(),
        "no task is being learned: call begin_task before commit_task",
    ),
    "abandon without begin": (
        lambda: taught("mlp"),
        lambda net: net.abandon_task(),
        "no task is being learned: call begin_task before abandon_task",
    ),
    "commit of a NaN": (
        with_nan,
        lambda net: net.commit_task(),
        "task 'open' cannot be committed: hidden.1.selector holds values that are not finite",
    ),
    "unknown task": (
        lambda: taught("mlp"),
        lambda net: net(X, task="tsak 1"),
        "there is no task 'tsak 1', only 'task 0', 'task 1', 'task 2'",
    ),
    "index too high": (
        lambda: taught("mlp"),
        lambda net: net(X, task=3),
        "task index 3 is out of range: the network has 3 tasks",
    ),
    "negative index": (
        lambda: taught("mlp"),
        lambda net: net(X, task=-1),
        "task index -1 is out of range",
    ),
    "no index at all": (
        lambda: taught("mlp"),
        lambda net: net(X, task=None),
        "this network cannot guess a task: name one",
    ),
    "a mixed batch with an index too high": (
        lambda: taught("mlp"),
        lambda net: net(X, task=ids(0, 1, 2, 3, 0, 0)),
        "task index 3 is out of range",
    ),
    "a mixed batch with a negative index": (
        lambda: taught("mlp"),
        lambda net: net(X, task=ids(0, 1, 2, -1, 0, 0)),
        "task index -1 is out of range",
    ),
    "a mixed batch with the task being learned": (
        learning,
        lambda net: net(X, task=six(3)),
        "task 'open' is still being learned: commit it first",
    ),
    "a mixed batch of fractions": (
        lambda: taught("mlp"),
        lambda net: net(X, task=six(1).float()),
        r"must be a tensor of one index per sample, got shape \[6\] of torch.float32",
    ),
    "a mixed batch of another length": (
        lambda: taught("mlp"),
        lambda net: net(X, task=ids(0, 1)),
        "got 2 task indices for 6 samples",
    ),
    "a mixed batch of one number": (
        lambda: taught("mlp"),
        lambda net: net(torch.tensor(1.0), task=ids(0, 1)),
        "a mixed batch must have a dimension of samples, got a single number",
    ),
    "merging what is being learned": (
        learning,
        lambda net: net.merged("open"),
        "task 'open' is still being learned",
    ),
    "wrong number of features": (
        lambda: taught("mlp"),
        lambda net: net(torch.zeros(2, 8), task=0),
        r"layer 'hidden.0' expects 9 features in the last dimension, got .* shape \[2, 8\]",
    ),
    "wrong number of channels": (
        lambda: taught("resnet18"),
        lambda net: net(torch.zeros(2, 1, 16, 16), task=0),
        r"layer 'stem' expects \[batch, 3 channels, height, width\], got .* \[2, 1, 16, 16\]",
    ),
    "one class": (
        lambda: taught("mlp"),
        lambda net: net.begin_task("b", 1),
        "classes must be a whole number of at least 2, got 1",
    ),
    "very many classes": (
        lambda: taught("mlp"),
        lambda net: net.begin_task("b", 10**9),
        "classes must be at most 1,048,576, got 1,000,000,000",
    ),
    "a fraction of classes": (
        lambda: taught("mlp"),
        lambda net: net.begin_task("b", 2.5),
        "classes must be a whole number of at least 2, got 2.5",
    ),
    "a name with a slash": (
        lambda: taught("mlp"),
        lambda net: net.begin_task("a/b", 2),
        "a task's name must not contain a slash .* got 'a/b'",
    ),
    "an empty name": (
        lambda: taught("mlp"),
        lambda net: net.begin_task(" ", 2),
        "a task needs a name, got ' '",
    ),
    "a repeated name": (
        lambda: taught("mlp"),
        lambda net: net.begin_task("task 1", 2),
        "there is already a task 'task 1'",
    ),
    "a name with a line break": (
        lambda: taught("mlp"),
        lambda net: net.begin_task("a\nb", 2),
        "a control character, .* got 'a.*b'",
    ),
    "a very long name": (
        lambda: taught("mlp"),
        lambda net: net.begin_task("ä" * 101, 2),
        "at most 200 bytes long, got 202",
    ),
    "a start for selectors that is none": (
        lambda: taught("mlp"),
        lambda net: net.begin_task("b", 2, selectors="last"),
        "selectors must start at a number, 'previous' or 'halfway', got 'last'",
    ),
    "a truth for selectors": (
        lambda: taught("mlp"),
        lambda net: net.begin_task("b", 2, selectors=True),
        "selectors must start at a number, 'previous' or 'halfway', got True",
    ),
    "a start for norms that is none": (
        lambda: taught("mlp"),
        lambda net: net.begin_task("b", 2, norms="last"),
        "norms must start 'fresh' or 'previous', got 'last'",
    ),
    "a start for factors that is none": (
        lambda: taught("mlp"),
        lambda net: net.begin_task("b", 2, factors=0),
        "factors must start with a positive length, got 0",
    ),
    "another dtype": (
        lambda: taught("mlp"),
        lambda net: net.half(),
        r"stays in torch.float32, as torch.float16 would change the bits .* merged\(task\)",
    ),
    "another dtype for one layer": (
        lambda: taught("mlp"),
        lambda net: net.body.hidden[0].double(),
        "stays in torch.float32",
    ),
    "inputs of another dtype": (
        lambda: taught("mlp"),
        lambda net: net(X.double(), task=0),
        "layer 'hidden.0' computes in torch.float32, got torch.float64",
    ),
    "images of another dtype": (
        lambda: taught("resnet18"),
        lambda net: net(inputs("resnet18").half(), task=0),
        "computes in torch.float32, got torch.float16",
    ),
    "inputs of another library": (
        lambda: taught("mlp"),
        lambda net: net(X.numpy(), task=0),
        "inputs must be a tensor, got a NumPy array",
    ),
    "no inputs": (
        lambda: taught("mlp"),
        lambda net: net(None, task=0),
        "inputs must be a tensor, or what else the module takes, got None",
    ),
    "no inputs of a mixed batch": (
        lambda: taught("mlp"),
        lambda net: net(None, task=ids(0, 1)),
        "inputs must be a tensor, or what else the module takes, got None",
    ),
    "a layer by itself": (
        lambda: taught("mlp"),
        lambda net: net.body.hidden[0](X),
        r"layer 'hidden.0' was called directly: .* rankup\.layers\.active\(index\)",
    ),
    "a name for the layers": (
        lambda: taught("mlp"),
        lambda net: rankup.layers.active("task 0").__enter__(),  # type: ignore[arg-type]
        "active takes a task's index, got 'task 0'",
    ),
    "a task per sample, mapped": (
        lambda: taught("mlp"),
        lambda net: torch.func.vmap(lambda x, task: net(x[None], task=task[None]))(
            X, torch.zeros(len(X), dtype=torch.long)
        ),
        "vmap cannot map over a task per sample",
    ),
    "saving what was not grown": (
        lambda: taught("mlp"),
        lambda net: rankup.save(net.body, "anywhere"),
        "save takes a network made by grow, got MLP",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_network_refuses_and_keeps_all_it_has(case: str) -> None:
    make, call, message = REFUSED[case]
    net = make()
    x = X if isinstance(net.body, rankup.models.MLP) else inputs("resnet18")
    answers, state = logits(net, x), copy.deepcopy(net.state_dict())
    with pytest.raises(rankup.RankupError, match=message):
        call(net)
    assert_same_bits(answers, logits(net, x))
    assert net.state_dict().keys() == state.keys()
    for key, value in net.state_dict().items():
        assert torch.equal(value, state[key]) or case == "commit of a NaN"
    # Still good for the next task.
    if net.learning:
        net.abandon_task()
    teach(net, "next", x)


@pytest.fixture(scope="module")
def normed() -> rankup.IncrementalNet:
    """A network with batch norms, only to be copied."""
    return taught("resnet18", tasks=[3])


@pytest.fixture(scope="module")
def committed(normed: rankup.IncrementalNet) -> torch.Tensor:
    """What it answers for a second task."""
    net, x = copy.deepcopy(normed), inputs("resnet18")
    net.begin_task("b", 2)
    net.commit_task(calibrate=[x])
    return net(x, task="b")


@pytest.mark.parametrize(
    ("calibrate", "message"),
    [
        (None, r"has batch norms \(norm, …\) .* commit_task\(calibrate=batches\)"),
        (inputs("resnet18"), "an iterable of input tensors"),
        ([], "calibrate yielded no batch"),
        (5, "an iterable of input tensors"),
        ([inputs("resnet18")[:0]], "must yield batches with samples, got an empty one"),
        ([(inputs("resnet18"), 0)], r"got a tuple; if a loader also yields labels, pass \(x for"),
        ([torch.full((4, 3, 16, 16), torch.inf)], "cannot be committed: .* not finite"),
        ([inputs("resnet18"), torch.zeros(4, 2, 16, 16)], "layer 'stem' expects"),
    ],
)
def test_batch_norms_refuse_to_commit_without_usable_data(
    calibrate: object, message: str, normed: rankup.IncrementalNet, committed: torch.Tensor
) -> None:
    net = copy.deepcopy(normed)
    x = inputs("resnet18")
    before = logits(net, x)
    net.begin_task("b", 2)
    with pytest.raises(rankup.RankupError, match=message):
        net.commit_task(calibrate=calibrate)
    assert net.learning == "b"
    assert net.tasks == ["task 0"]
    assert net.body.norm.pool is None
    assert_same_bits(before, logits(net, x))
    # The failed try leaves no trace in the statistics of the next one.
    net.commit_task(calibrate=[x])
    assert torch.equal(net(x, task="b"), committed)


def test_single_sample_has_no_statistics() -> None:
    body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    net = rankup.grow(body, Rank(2, 1), head="2")
    net.begin_task("a", 2)
    x = torch.randn(9, 5)
    with pytest.raises(rankup.RankupError, match="batch norm '1' .* batches of at least two"):
        net.commit_task(calibrate=[x[:8], x[8:]])
    net.commit_task(calibrate=[x[:4], x[4:]])


class Folded(nn.Module):
    """Puts the positions of a sequence into the batch, or in front of it."""

    def __init__(self, fold: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fold = fold
        self.hidden, self.head = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor | dict[str, Tensor], scale: float = 1.0) -> Tensor:
        x = x["x"] if isinstance(x, dict) else x
        y = self.hidden(self.fold(x * scale))
        return self.head(y.view(len(x), -1, 6).mean(1))


def into_the_batch(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def in_front(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous()


def folded(fold: Callable[[Tensor], Tensor]) -> Net:
    net = rankup.grow(Folded(fold), Rank(2, 1), head="head")
    for task in ("a", "b"):
        net.begin_task(task, 2)
        net.commit_task()
    return net.eval()


@pytest.mark.parametrize("batch", [3, 4])  # 4 is also the length of the sequences
def test_sequence_in_front_of_mixed_batch_is_refused(batch: int) -> None:
    net, x = folded(in_front), torch.randn(batch, 4, 5)
    net(x, task="a")
    for given, options in ((x, {}), (x, {"scale": 2.0}), ({"x": x}, {})):
        with pytest.raises(rankup.RankupError, match="layer 'hidden' got .* each task by itself"):
            net(given, task=torch.arange(batch) % 2, **options)


@pytest.mark.parametrize("batch", [2, 3, 4])
def test_module_that_folds_runs_task_after_task(batch: int) -> None:
    net, x, tasks = folded(into_the_batch), torch.randn(batch, 4, 5), torch.arange(batch) % 2
    loop = torch.cat([net(x[i : i + 1], task=t) for i, t in enumerate(tasks.tolist())])
    for given, options in ((x, {}), (x, {"scale": 1.0}), ({"x": x}, {})):
        torch.testing.assert_close(net(given, task=tasks, **options), loop)


def test_mixed_batch_is_tried_again_with_other_options() -> None:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(5, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor, turned: bool = False) -> Tensor:
            x = self.hidden(x.transpose(0, 1) if turned else x).relu()
            return self.head((x.transpose(0, 1) if turned else x).mean(1))

    net = rankup.grow(Turning(), Rank(2, 1), head="head")
    for task in ("a", "b"):
        net.begin_task(task, 2)
        net.commit_task()
    x, tasks = torch.randn(4, 4, 5), torch.arange(4) % 2
    net(x, task=tasks, turned=False)
    with pytest.raises(rankup.RankupError, match="layer .hidden. got .* each task by itself"):
        net(x, task=tasks, turned=True)


def test_mixed_batch_takes_options_of_equal_length() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.head(self.hidden(x @ mask).relu())

    net = rankup.grow(Masked(), Rank(2, 1), head="head")
    for task in ("a", "b"):
        net.begin_task(task, 2)
        net.commit_task()
    x, mask, tasks = torch.randn(4, 4), torch.randn(4, 4), torch.arange(4) % 2
    apart = torch.stack([net(x, task=int(t), mask=mask)[n] for n, t in enumerate(tasks)])
    torch.testing.assert_close(net(x, task=tasks, mask=mask), apart)


def test_errors_are_of_one_family() -> None:
    assert issubclass(rankup.TaskStateError, rankup.RankupError)
    assert issubclass(rankup.StoreError, rankup.RankupError)
    assert issubclass(rankup.RankupError, ValueError)
    assert issubclass(rankup.TaskStateError, RuntimeError)
