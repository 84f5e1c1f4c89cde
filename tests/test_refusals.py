"""Bad input gets one clear sentence, and nothing is lost."""

import copy
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import rankup
from rankup.rank import Rank
from zoo import Transformer, assert_same_bits, inputs, logits, module, taught, teach

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
        "no task is being learned: begin_task comes before commit_task",
    ),
    "abandon without begin": (
        lambda: taught("mlp"),
        lambda net: net.abandon_task(),
        "no task is being learned: begin_task comes before abandon_task",
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
        "task must be a name, an index, a list of these or a tensor of indices, got None",
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
    "a fraction of classes": (
        lambda: taught("mlp"),
        lambda net: net.begin_task("b", 2.5),
        "classes must be a whole number of at least 2, got 2.5",
    ),
    "a name with a slash": (
        lambda: taught("mlp"),
        lambda net: net.begin_task("a/b", 2),
        "a task's name must have no slash, .* got 'a/b'",
    ),
    "an empty name": (
        lambda: taught("mlp"),
        lambda net: net.begin_task(" ", 2),
        "a task needs a name, got ' '",
    ),
    "a repeated name": (
        lambda: taught("mlp"),
        lambda net: net.begin_task("task 1", 2),
        "there is a task 'task 1' already",
    ),
    "a name with a line break": (
        lambda: taught("mlp"),
        lambda net: net.begin_task("a\nb", 2),
        "no control character",
    ),
    "a very long name": (
        lambda: taught("mlp"),
        lambda net: net.begin_task("ä" * 101, 2),
        "at most 200 bytes, got 202",
    ),
    "a start for selectors that is none": (
        lambda: taught("mlp"),
        lambda net: net.begin_task("b", 2, selectors="last"),
        "selectors must start at a number or 'previous', got 'last'",
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
        r"stays in torch.float32, torch.float16 would change the bits .* merged\(task\)",
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
        "inputs are a NumPy array, expected a tensor",
    ),
    "a layer by itself": (
        lambda: taught("mlp"),
        lambda net: net.body.hidden[0](X),
        r"layer 'hidden.0' was called by itself: .* rankup\.layers\.active\(index\)",
    ),
    "a name for the layers": (
        lambda: taught("mlp"),
        lambda net: rankup.layers.active("task 0").__enter__(),  # type: ignore[arg-type]
        "active takes a task's index, got 'task 0'",
    ),
    "a state of another network": (
        lambda: taught("mlp"),
        lambda net: net.load_state_dict(taught("mlp", tasks=[2]).state_dict()),
        r"state is not of a network with the same .* is of shape .*; .* rankup\.load",
    ),
    "a state of other classes": (
        lambda: taught("mlp", tasks=[2, 3]),
        lambda net: net.load_state_dict(taught("mlp", tasks=[3, 2]).state_dict()),
        "tasks: its tasks have other numbers of classes",
    ),
    "a state of the module alone": (
        lambda: taught("mlp"),
        lambda net: net.load_state_dict(net.body.state_dict()),
        r"the same layers and tasks: 'body\..*' is only here",
    ),
    "a task per sample, mapped": (
        lambda: taught("mlp"),
        lambda net: torch.func.vmap(lambda x, task: net(x[None], task=task[None]))(
            X, torch.zeros(len(X), dtype=torch.long)
        ),
        "a task per sample cannot be mapped over by vmap",
    ),
    "saving what was not grown": (
        lambda: taught("mlp"),
        lambda net: rankup.save(net.body, "anywhere"),
        "save takes a network that grow made, got MLP",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_network_refuses_and_keeps_all_it_has(case: str) -> None:
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


@pytest.mark.parametrize(
    ("calibrate", "message"),
    [
        (None, r"has batch norms \(norm, …\) .* commit_task\(calibrate=batches\)"),
        (inputs("resnet18"), "an iterable of input tensors"),
        ([], "calibrate gave no batch"),
        (5, "an iterable of input tensors"),
        ([inputs("resnet18")[:0]], "must give batches with samples, got one without"),
        ([(inputs("resnet18"), 0)], r"got a tuple; where a loader gives labels, too, take \(x for"),
        ([torch.full((4, 3, 16, 16), torch.inf)], "cannot be committed: .* not finite"),
        ([inputs("resnet18"), torch.zeros(4, 2, 16, 16)], "layer 'stem' expects"),
    ],
)
def test_batch_norms_refuse_to_commit_without_usable_data(calibrate: object, message: str) -> None:
    net = taught("resnet18", tasks=[3])
    x = inputs("resnet18")
    before = logits(net, x)
    net.begin_task("b", 2)
    with pytest.raises(rankup.RankupError, match=message):
        net.commit_task(calibrate=calibrate)
    assert net.learning == "b"
    assert net.tasks == ["task 0"]
    assert net.body.norm.pool is None
    assert_same_bits(before, logits(net, x))
    # What was tried leaves no trace in the statistics of the next try.
    net.commit_task(calibrate=[x])
    fresh = taught("resnet18", tasks=[3])
    fresh.begin_task("b", 2)
    fresh.commit_task(calibrate=[x])
    assert torch.equal(fresh(x, task="b"), net(x, task="b"))


def test_a_single_sample_has_no_statistics() -> None:
    body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    net = rankup.grow(body, Rank(2, 1), head="2")
    net.begin_task("a", 2)
    x = torch.randn(9, 5)
    with pytest.raises(rankup.RankupError, match="batch norm '1' .* batches of two samples"):
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


@pytest.mark.parametrize("fold", [into_the_batch, in_front])
@pytest.mark.parametrize("batch", [3, 4])  # 4 is also the length of the sequences
def test_a_mixed_batch_needs_samples_in_the_first_dimension(
    fold: Callable[[Tensor], Tensor], batch: int
) -> None:
    net = rankup.grow(Folded(fold), Rank(2, 1), head="head")
    for task in ("a", "b"):
        net.begin_task(task, 2)
        net.commit_task()
    x = torch.randn(batch, 4, 5)
    net(x, task="a")
    for given, options in ((x, {}), (x, {"scale": 2.0}), ({"x": x}, {})):
        with pytest.raises(rankup.RankupError, match="layer 'hidden' got .* folds other dim"):
            net(given, task=torch.arange(batch) % 2, **options)


def test_a_mixed_batch_is_looked_at_again_with_another_option() -> None:
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
    with pytest.raises(rankup.RankupError, match="layer 'hidden' got .* folds other dim"):
        net(x, task=tasks, turned=True)


def test_a_mixed_batch_takes_options_that_are_as_long_as_it_is_by_chance() -> None:
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


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x).relu() if x.sum() > 0 else self.hidden(x))


class ReadsWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x) + self.hidden.weight.sum())


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def mlp() -> nn.Module:
    return rankup.models.mlp(9, hidden=[8, 7])


def hooked() -> nn.Module:
    made = mlp()
    made.hidden[0].register_forward_hook(lambda *_: None)
    return made


def hooked_back() -> nn.Module:
    made = mlp()
    made.hidden[0].register_full_backward_pre_hook(lambda *_: None)
    return made


def weight_normed() -> nn.Module:
    made = mlp()
    nn.utils.parametrizations.weight_norm(made.hidden[0])
    return made


def mixed_dtypes() -> nn.Module:
    made = mlp()
    made.hidden[0].double()
    return made


class OwnCopy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.hidden(x).relu())
        return answer

    def __deepcopy__(self, memo: object) -> "OwnCopy":
        made = OwnCopy()
        made.load_state_dict(self.state_dict())
        return made


class Stem(nn.Module):
    """Runs a layer of another module, which it does not own."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = weakref.ref(owner)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.owner().hidden(x)  # type: ignore[union-attr, operator]
        return answer


def referred_to_weakly() -> nn.Module:
    made = mlp()
    made.stem = Stem(made)
    return made


def with_a_function_in_an_object() -> nn.Module:
    made = mlp()
    made.held = SimpleNamespace(run=lambda x: made.hidden(x))
    return made


def with_listed_parameters() -> nn.Module:
    made = mlp()
    made.listed = {"all": [made.hidden[0].weight]}
    return made


def with_a_sparse_buffer() -> nn.Module:
    made = mlp()
    made.register_buffer("near", torch.eye(4).to_sparse())
    return made


def quietly(make: Callable[..., nn.Module], *given: object) -> nn.Module:
    """What torch warns of, whatever becomes of it here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*given)


def with_a_buffer_of(dtype: torch.dtype) -> nn.Module:
    made = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))
    made.register_buffer("waves", torch.ones(4, dtype=dtype))
    return made


class Shortens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 5, max_norm=1.0)
        self.hidden, self.head = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.hidden(self.words(x)).relu())
        return answer


class WantsATask(Untraceable):
    def forward(self, x: Tensor, task: int) -> Tensor:  # type: ignore[override]
        answer: Tensor = self.head(task * self.hidden(x).relu())
        return answer


class TwoHeads(nn.Module):
    """With one that helps in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(5, 6)
        self.head, self.aside = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        features = self.hidden(x).relu()
        answer: Tensor = self.head(features)
        return (answer, self.aside(features)) if self.training else answer


CANNOT_GROW: dict[str, tuple[Callable[[], object], dict[str, object], str]] = {
    "no module": (lambda: 5, {}, "grow takes an nn.Module, got int"),
    "a grown network": (lambda: taught("mlp"), {}, "is a grown network already"),
    "nothing but a head": (lambda: nn.Sequential(nn.Linear(5, 2)), {}, "nothing to factor"),
    "everything excluded": (mlp, {"exclude": "hidden"}, "nothing to factor"),
    "no Linear": (lambda: nn.Conv2d(3, 2, 1), {}, "no Linear that could be the head"),
    "a Linear in front of a convolution": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Conv2d(3, 2, 1)),
        {},
        "no Linear that could be the head: '1' runs after",
    ),
    "an untraceable module": (Untraceable, {}, "torch.fx cannot trace .* head='name'"),
    "last of an untraceable module": (
        Untraceable,
        {"head": "head", "last": 1},
        "last=1 needs the order in which layers run",
    ),
    "a head that is none": (mlp, {"head": "tail"}, "head='tail' is no Linear .* hidden.0, hidden"),
    "a head of another kind": (
        lambda: nn.Sequential(nn.Linear(5, 6), Doubled(6, 2)),
        {"head": "1"},
        "the head '1' must be a plain Linear .* name another layer with head=",
    ),
    "an excluded head": (mlp, {"exclude": "head"}, "the head 'head' cannot be excluded"),
    "a pattern for nothing": (mlp, {"exclude": "hiden*"}, "exclude='hiden.' matches nothing"),
    "an include for nothing": (mlp, {"include": ["conv*"]}, "include='conv.' matches nothing"),
    "an include that is no pattern": (mlp, {"include": 3}, "include takes names or .*, got 3"),
    "an exclude with no pattern in it": (
        mlp,
        {"exclude": ["hidden.0", None]},
        "exclude .* got None",
    ),
    "more last layers than there are": (mlp, {"last": 3}, "last=3 must be from 1 to 2"),
    "no last layers": (mlp, {"last": 0}, "last=0 must be from 1 to 2"),
    "half a last layer": (mlp, {"last": 1.5}, "last must be a whole number, got 1.5"),
    "a base that is none": (mlp, {"base": "old"}, "base must be 'new' or 'keep', got 'old'"),
    "a seed that is none": (mlp, {"seed": "one"}, "seed must be a whole number, got 'one'"),
    "a rank that is none": (mlp, {"rank": 11}, "rank must be a Rank .* got 11"),
    "hooks": (hooked, {}, "'hidden.0' .it has hooks."),
    "hooks of backward passes": (hooked_back, {}, "'hidden.0' .it has hooks."),
    "weight norm": (weight_normed, {}, "cannot factor 'hidden.0'"),
    "weights read directly": (ReadsWeights, {}, "'hidden' .the module's forward reads its weights"),
    "a lazy layer": (
        lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)),
        {},
        "layers of the module are not initialised yet .0.: run it once on an input",
    ),
    "a copy of its own kind": (OwnCopy, {}, "a layer 'hidden' of its own, as where a class has"),
    "a weak reference": (referred_to_weakly, {}, "'stem.owner' is or holds a func"),
    "a function in an object": (with_a_function_in_an_object, {}, "'held' is or holds a function"),
    "a list of parameters": (with_listed_parameters, {}, "'listed' holds parameters that the mod"),
    "a sparse buffer": (with_a_sparse_buffer, {}, "'near' is a sparse tensor, which cannot be st"),
    "a complex buffer": (
        lambda: with_a_buffer_of(torch.complex128),
        {},
        "'waves' is a complex128 tensor, which cannot be stored",
    ),
    "complex weights": (
        lambda: quietly(mlp().to, torch.complex64),
        {},
        r"weights must be real numbers, got torch\.complex64",
    ),
    "no numbers": (lambda: mlp().to("meta"), {}, "on the device 'meta', which holds no numbers"),
    "compiled layers": (
        lambda: nn.Sequential(quietly(torch.jit.script, nn.Linear(5, 6)), nn.Linear(6, 2)),
        {"exclude": "0"},
        "'0' was compiled with torch.jit, .* the module that it was made from",
    ),
    "a compiled module": (
        lambda: quietly(torch.jit.script, mlp()),
        {},
        "the module was compiled with torch.jit",
    ),
    "rows that change when they are read": (Shortens, {"exclude": "words"}, "'words' has a max_no"),
    "a task of its own": (WantsATask, {"head": "head"}, "an argument of its own called task"),
    "two heads": (TwoHeads, {}, "last is 'aside' in training and 'head' when the module answers"),
    "a wrapper": (lambda: nn.DataParallel(mlp()), {}, "the module inside a DataParallel"),
    "two dtypes": (mixed_dtypes, {}, "one dtype .* got torch.float32, torch.float64"),
    "torch's own encoder": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, batch_first=True), nn.Flatten(), nn.Linear(16, 2)
        ),
        {"include": "0"},
        "cannot factor '0' .TransformerEncoderLayer.; pass exclude=..0",
    ),
}


@pytest.mark.parametrize("case", CANNOT_GROW)
def test_what_cannot_be_grown_is_refused_before_anything_is_changed(case: str) -> None:
    make, options, message = CANNOT_GROW[case]
    given = make()
    options = {"rank": Rank(2, 1), **options}
    with pytest.raises(rankup.RankupError, match=message) as caught:
        rankup.grow(given, **options)
    assert "\n" not in str(caught.value)


def test_an_untraceable_module_can_be_grown_with_its_head_named() -> None:
    net = rankup.grow(Untraceable(), Rank(2, 1), head="head")
    x = torch.randn(6, 5)
    teach(net, "a", x)
    torch.testing.assert_close(net.merged("a")(x), net(x, task="a"))


def test_errors_are_of_one_family() -> None:
    assert issubclass(rankup.TaskStateError, rankup.RankupError)
    assert issubclass(rankup.StoreError, rankup.RankupError)
    assert issubclass(rankup.RankupError, ValueError)
    assert issubclass(rankup.TaskStateError, RuntimeError)


def test_modules_written_elsewhere_keep_their_class() -> None:
    assert isinstance(rankup.grow(Transformer(), Rank(2, 1)).body, Transformer)
    assert type(module("mlp")) is rankup.models.MLP
