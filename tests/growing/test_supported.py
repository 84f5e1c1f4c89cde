"""Modules that cannot be grown are refused in one clear sentence."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.own_modules import halves
from helpers.zoo import Transformer, taught, teach
from rankup.rank import Rank


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x).relu())


class Untraceable(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x).relu() if x.sum() > 0 else self.hidden(x))


class Unnamed(nn.Module):
    """Untraceable, and its layers' names tell nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu() if x.sum() > 0 else self.one(x))


class Scaled(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.scale = nn.Parameter(torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class NoClassifier(Pair):
    def get_classifier(self) -> nn.Module:
        return nn.Identity()


def mlp() -> nn.Module:
    return rankup.models.mlp(9, hidden=[8, 7])


def changed(change: Callable[[Any], object], make: Callable[[], nn.Module] = mlp) -> nn.Module:
    module = make()
    change(module)
    return module


class OwnCopy(Pair):
    def __deepcopy__(self, memo: object) -> "OwnCopy":
        made = OwnCopy()
        made.load_state_dict(self.state_dict())
        return made


def quietly(make: Callable[..., nn.Module], *given: object) -> nn.Module:
    """Make a module, ignoring torch's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*given)


class Shortens(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 5, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.words(x))


class Calling(Pair):
    """Runs its layer by a function that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.run = lambda x: self.hidden(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(x).relu())


class WantsATask(Pair):
    def forward(self, x: Tensor, task: int) -> Tensor:
        return super().forward(task * x)


class TwoHeads(Pair):
    """With an auxiliary one that is used only in training."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        features = self.hidden(x).relu()
        answer = self.head(features)
        return (answer, self.aside(features)) if self.training else answer


class WantsX(Pair):
    def forward(self, images: Tensor, x: Tensor) -> Tensor:
        return super().forward(images + x)


CANNOT_GROW: dict[str, tuple[Callable[[], object], dict[str, object], str]] = {
    "no module": (lambda: 5, {}, "grow takes an nn.Module, got int"),
    "a grown network": (lambda: taught("mlp", [3]), {}, "is already a grown network"),
    "nothing but a head": (lambda: nn.Sequential(nn.Linear(5, 2)), {}, "nothing to factor"),
    "everything excluded": (mlp, {"exclude": "hidden"}, "nothing to factor"),
    "no Linear": (lambda: nn.Conv2d(3, 2, 1), {}, "no Linear that could be the head"),
    "a Linear in front of a convolution": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Conv2d(3, 2, 3)),
        {},
        "no Linear that could be the head: '1' runs after",
    ),
    "an untraceable module": (Unnamed, {}, "torch.fx cannot trace .* head='name'"),
    "last of an untraceable module": (
        Untraceable,
        {"head": "head", "last": 1},
        "last=1 needs the order in which layers run",
    ),
    "a head that is none": (mlp, {"head": "tail"}, r"'tail' is not a Linear .* hidden.\*, head"),
    "a head with more for each class": (
        lambda: nn.Sequential(nn.Linear(5, 6), Scaled(6, 2)),
        {"head": "1"},
        "the head '1' has a parameter 'scale' besides its weight and bias",
    ),
    "a model without a classifier": (NoClassifier, {}, "no classifier, .* pass head='new'"),
    "features of unknown number": (Pair, {"head": "new"}, "head='new' needs to know how many"),
    "a per_task for nothing": (mlp, {"per_task": "cls"}, "per_task='cls' matches no parameter"),
    "an excluded head": (mlp, {"exclude": "head"}, "the head 'head' cannot be excluded"),
    "a pattern for nothing": (mlp, {"exclude": "hiden*"}, "exclude='hiden.' matches nothing"),
    "an include for nothing": (mlp, {"include": ["conv*"]}, "include='conv.' matches nothing"),
    "an include that is no pattern": (mlp, {"include": 3}, "include takes names or .*, got 3"),
    "more last layers than there are": (mlp, {"last": 3}, "last=3 must be from 1 to 2"),
    "half a last layer": (mlp, {"last": 1.5}, "last must be a whole number, got 1.5"),
    "a base that is none": (mlp, {"base": "old"}, "base must be 'new' or 'keep', got 'old'"),
    "a seed that is none": (mlp, {"seed": "one"}, "seed must be a whole number, got 'one'"),
    "a rank that is none": (mlp, {"rank": 11}, "rank must be a Rank .* got 11"),
    "a lazy layer": (
        lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)),
        {},
        "layers of the module are not initialised yet .0.: run the module once",
    ),
    "a lazy norm": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d(), nn.Linear(4, 2)),
        {},
        "layers of the module are not initialised yet .1.: run the module once",
    ),
    "a copy of its own kind": (OwnCopy, {}, "a layer 'hidden' of its own, as when a class"),
    "a lambda that uses self": (Calling, {"head": "head"}, "lambda that uses self: make it a met"),
    "layers in a dict": (
        lambda: changed(lambda m: setattr(m, "more", {"layers": [nn.Linear(6, 6)]}), Pair),
        {"head": "head"},
        "'more' holds layers that torch does not know",
    ),
    "a second argument x": (WantsX, {}, "an argument named x that is not its first"),
    "a sparse buffer": (
        lambda: changed(lambda m: m.register_buffer("near", torch.eye(4).to_sparse())),
        {},
        "'near' is a sparse tensor, which cannot be stored",
    ),
    "a complex buffer": (
        lambda: changed(lambda m: m.register_buffer("waves", torch.ones(4).to(torch.complex128))),
        {},
        "'waves' is a complex128 tensor, which cannot be stored",
    ),
    "complex weights": (
        lambda: quietly(mlp().to, torch.complex64),
        {},
        r"weights must be real numbers, got torch\.complex64",
    ),
    "no numbers": (lambda: mlp().to("meta"), {}, "on the device 'meta', which holds no values"),
    "compiled layers": (
        lambda: nn.Sequential(quietly(torch.jit.script, nn.Linear(5, 6)), nn.Linear(6, 2)),
        {"exclude": "0"},
        "'0' was compiled with torch.jit, .* the module that it was made from",
    ),
    "rows that change when they are read": (Shortens, {"exclude": "words"}, "'words' has a max_no"),
    "a task of its own": (WantsATask, {"head": "head"}, "requires an argument named task"),
    "two heads": (TwoHeads, {}, "could be its head, 'head' and 'aside': name one, or all"),
    "a wrapper": (lambda: nn.DataParallel(mlp()), {}, "the module inside a DataParallel"),
    "two dtypes": (
        lambda: changed(lambda m: m.hidden[0].double()),
        {},
        "learn in torch.float64 beside weights in torch.float32 .* must be in one dtype",
    ),
}


@pytest.mark.parametrize("case", CANNOT_GROW)
def test_module_that_cannot_grow_is_refused(case: str) -> None:
    make, options, message = CANNOT_GROW[case]
    module = make()
    with pytest.raises(rankup.RankupError, match=message) as caught:
        rankup.grow(module, **{"rank": Rank(2, 1), **options})
    assert "\n" not in str(caught.value)


def test_untraceable_module_grows_if_head_is_named() -> None:
    net = rankup.grow(Untraceable(), Rank(2, 1), head="head")
    x = torch.randn(6, 5)
    teach(net, "a", x)
    torch.testing.assert_close(net.merged("a")(x), net(x, task="a"))


def test_module_keeps_its_class() -> None:
    assert isinstance(rankup.grow(Transformer(), Rank(2, 1)).body, Transformer)


class Asking(nn.Module):
    """Runs a ReLU after layers of a certain class."""

    def __init__(self, of: type[nn.Module]) -> None:
        super().__init__()
        self.of = of
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, self.of):
                x = x.relu()
        return self.head(x)


@pytest.mark.parametrize("of", [nn.Linear, nn.LayerNorm])
def test_forward_that_checks_class_of_layers_is_refused(of: type[nn.Module]) -> None:
    with pytest.raises(rankup.RankupError, match="takes a different path .* isinstance"):
        rankup.grow(Asking(of), Rank(2, 1))
    rankup.grow(Asking(nn.Conv2d), Rank(2, 1))


@pytest.mark.parametrize("inside", [True, False])
def test_compiled_module_is_refused(inside: bool) -> None:
    block: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    if inside:
        module: Any = nn.Sequential(torch.compile(block, backend="eager"), nn.Linear(8, 3))
    else:
        module = torch.compile(nn.Sequential(block, nn.Linear(8, 3)), backend="eager")
    with pytest.raises(rankup.RankupError, match=r"compiled with torch.compile.*\._orig_mod"):
        rankup.grow(module, Rank(2, 1))


class Marked(nn.Module):
    """Looks at an attribute that it has set on a layer."""

    def __init__(self, name: str = "residual") -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.name = name
        setattr(self.a, name, True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            x = x + layer(x) if getattr(layer, self.name, False) else layer(x)
        return self.head(x)


def test_attributes_of_layers_stay() -> None:
    module, x = Marked(), torch.randn(5, 8)
    net = rankup.grow(module, Rank(2, 1), base="keep")
    net.begin_task("a", 3)
    seen: list[Tensor] = []
    for head in (module.head, net.body.get_submodule("head")):
        head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    module(x), net(x, task="a")
    assert torch.equal(*seen)
    net.commit_task()
    torch.testing.assert_close(net.merged("a")(x), net(x, task="a"))
    assert net.merged("a").get_submodule("a").residual is True


@pytest.mark.parametrize("name", ["seed", "U"])
def test_attributes_that_task_layers_have_are_refused(name: str) -> None:
    with pytest.raises(rankup.RankupError, match=f"'a' has an attribute '{name}'"):
        rankup.grow(Marked(name), Rank(2, 1))


def test_fit_refuses_forward_that_needs_more_than_inputs() -> None:
    class Wanting(nn.Sequential):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * mask)

    net = rankup.grow(Wanting(nn.Linear(12, 8), nn.Linear(8, 3)), Rank(2, 1))
    with pytest.raises(rankup.RankupError, match="missing a required argument: 'mask'; begin_task"):
        rankup.fit(net, halves())
