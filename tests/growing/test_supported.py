"""Modules that cannot be grown are refused in one clear sentence."""

import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.zoo import Transformer, module, taught, teach
from rankup.rank import Rank


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
    """Make a module, ignoring torch's warnings."""
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
    """With an auxiliary one that is used only in training."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(5, 6)
        self.head, self.aside = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        features = self.hidden(x).relu()
        answer: Tensor = self.head(features)
        return (answer, self.aside(features)) if self.training else answer


def with_hidden_layers() -> nn.Module:
    made = Untraceable()
    made.more = {"layers": [nn.Linear(6, 6)]}
    return made


class WantsX(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, images: Tensor, x: Tensor) -> Tensor:
        return self.head(self.hidden(images + x).relu())


CANNOT_GROW: dict[str, tuple[Callable[[], object], dict[str, object], str]] = {
    "no module": (lambda: 5, {}, "grow takes an nn.Module, got int"),
    "a grown network": (lambda: taught("mlp"), {}, "is already a grown network"),
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
    "a head that is none": (mlp, {"head": "tail"}, "'tail' is not a Linear .* hidden.0, hidden"),
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
    "no seed": (mlp, {"seed": None}, "seed must be a whole number, got None"),
    "a rank that is none": (mlp, {"rank": 11}, "rank must be a Rank .* got 11"),
    "hooks": (hooked, {}, "'hidden.0' .it has hooks."),
    "hooks of backward passes": (hooked_back, {}, "'hidden.0' .it has hooks."),
    "weight norm": (weight_normed, {}, "cannot factor 'hidden.0'"),
    "weights read directly": (ReadsWeights, {}, "'hidden' .the module's forward reads its weights"),
    "a lazy layer": (
        lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)),
        {},
        "layers of the module are not initialised yet .0.: run the module once",
    ),
    "a lazy layer that is excluded": (
        lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4), nn.Linear(4, 2)),
        {"exclude": ["0"]},
        "layers of the module are not initialised yet .0.: run the module once",
    ),
    "a lazy norm": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d(), nn.Linear(4, 2)),
        {},
        "layers of the module are not initialised yet .1.: run the module once",
    ),
    "a copy of its own kind": (OwnCopy, {}, "a layer 'hidden' of its own, as when a class"),
    "a weak reference": (referred_to_weakly, {}, "'stem.owner' is or holds a func"),
    "a function in an object": (with_a_function_in_an_object, {}, "'held' is or holds a function"),
    "a list of parameters": (with_listed_parameters, {}, "'listed' holds parameters that the mod"),
    "layers in a dict": (
        with_hidden_layers,
        {"head": "head"},
        "'more' holds layers that torch does not know",
    ),
    "a second argument x": (WantsX, {}, "an argument named x that is not its first"),
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
    "no numbers": (lambda: mlp().to("meta"), {}, "on the device 'meta', which holds no values"),
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
    "a task of its own": (WantsATask, {"head": "head"}, "requires an argument named task"),
    "two heads": (TwoHeads, {}, "last is 'aside' in training and 'head' in evaluation"),
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


def test_modules_written_elsewhere_keep_their_class() -> None:
    assert isinstance(rankup.grow(Transformer(), Rank(2, 1)).body, Transformer)
    assert type(module("mlp")) is rankup.models.MLP
