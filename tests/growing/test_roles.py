"""What becomes of each parameter: matrices, stacks of them, vectors, tied and made ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import rankup
from helpers.zoo import relative_error
from rankup.layers.spec import FactoredSpec, TensorSpec, WeightSpec
from rankup.rank import Rank


class Around(nn.Module):
    """A module between a Linear and a head."""

    def __init__(self, inner: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(6, width), inner, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.first(x))
        return self.head((x[0] if isinstance(x, tuple) else x).flatten(1))


class Experts(nn.Module):
    """Two matrices in one parameter, with the inputs first."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.up[0] + x.relu() @ self.up[1]


class Tokens(nn.Module):
    """A token, positions, a table that is looked up, and a parameter that nothing known reads."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 8))
        self.pos_embed = nn.Parameter(torch.randn(2, 8))
        self.biases = nn.Parameter(torch.randn(4, 8))
        self.odd = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("index", torch.tensor([1]))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.cls_token + self.pos_embed[:1] + self.biases[self.index]
        return x * self.odd.sum(0)


class Tied(nn.Module):
    """Two layers share a weight, and a third one an embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(8, 8) for _ in range(3))
        self.two.weight = self.one.weight
        self.words = nn.Embedding(8, 8)
        self.three.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.one(x).relu()) + self.words(torch.zeros(len(x), dtype=torch.long))
        return self.three(x)


class Caching(nn.Module):
    """Keeps what it computes in evaluation mode, as LeViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x * self.scale.exp()
        if "scale" not in self.cache:
            self.cache["scale"] = self.scale.exp()
        return x * self.cache["scale"]


def taught(module: nn.Module, x: Tensor, **options: Any) -> rankup.IncrementalNet:
    net = rankup.grow(module, Rank(2, 1), base="keep", **options)
    for task, classes in (("a", 2), ("b", 4)):
        net.train()
        net.begin_task(task, classes)
        optimiser = torch.optim.Adam(net.parameters(), lr=3e-2)
        for _ in range(3):
            optimiser.zero_grad()
            F.cross_entropy(net(x, task=task), torch.arange(len(x)) % classes).backward()
            optimiser.step()
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name
        net.commit_task()
    return net.eval()


def parts(net: rankup.IncrementalNet, kind: type[Any]) -> dict[str, Any]:
    return {spec.name: spec for spec in net.plan.layers if type(spec) is kind}


def assert_kept(net: rankup.IncrementalNet, x: Tensor, make: Any, folder: Path) -> None:
    answers = {task: net(x, task=task) for task in ("a", "b")}
    assert torch.equal(net(x, task="a"), answers["a"])
    rankup.save(net, folder)
    loaded = rankup.load(folder, module=make()).eval()
    for task, answer in answers.items():
        assert relative_error(net.merged(task)(x), answer) < 1e-5
        assert torch.equal(loaded(x, task=task), answer)


STACKED = {
    "attention": (lambda: nn.MultiheadAttention(16, 2), ["in_proj_weight", 3, (16, 16), False]),
    "LSTM": (lambda: nn.LSTM(16, 12), ["weight_hh_l0", 4, (12, 12), False]),
    "GRU": (lambda: nn.GRU(16, 12), ["weight_ih_l0", 3, (12, 16), False]),
}


class SelfAttended(nn.Module):
    def __init__(self, inner: nn.MultiheadAttention) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, x.relu()])
        answer: Tensor = self.inner(x, x, x)[0][0]
        return answer


@pytest.mark.parametrize("kind", STACKED)
def test_stacked_matrices_have_factors_of_their_own(kind: str, tmp_path: Path) -> None:
    make, (key, count, size, transposed) = STACKED[kind]

    def module() -> nn.Module:
        torch.manual_seed(0)
        inner: Any = make()
        inner = SelfAttended(inner) if kind == "attention" else inner
        around = Around(inner, 16)
        around.head = nn.Linear(16 if kind == "attention" else 12, 3)
        return around

    x = torch.randn(8, 6)
    net = taught(module(), x)
    path = "inner.inner" if kind == "attention" else "inner"
    weights = parts(net, WeightSpec)
    for index in range(count):
        spec = weights[f"{path}.{key}[{index}]"]
        assert (spec.outputs, spec.inputs, spec.transposed) == (*size, transposed)
    assert_kept(net, x, module, tmp_path / "net")


def test_experts_are_matrices_with_their_inputs_first(tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Around(Experts())

    x = torch.randn(8, 6)
    net = taught(make(), x)
    weights = parts(net, WeightSpec)
    assert list(weights) == ["inner.up[0]", "inner.up[1]"]
    assert all(spec.transposed for spec in weights.values())
    assert_kept(net, x, make, tmp_path / "net")


def test_transposed_convolution_has_its_inputs_first() -> None:
    inner = nn.Sequential(
        nn.Unflatten(1, (8, 1)), nn.ConvTranspose1d(8, 6, 4), nn.Flatten(), nn.Linear(24, 8)
    )
    x = torch.randn(8, 6)
    net = taught(Around(inner), x)
    spec = parts(net, WeightSpec)["inner.1.weight"]
    assert (spec.outputs, spec.inputs, spec.transposed) == (24, 8, True)
    assert relative_error(net.merged("b")(x), net(x, task="b")) < 1e-5


def test_tokens_positions_tables_and_what_is_unknown_stay_as_given() -> None:
    net = taught(Around(Tokens()), torch.randn(8, 6))
    shared = {name for name, _ in net.plan.dense.tensors}
    own = {"cls_token", "pos_embed", "biases", "odd", "index"}
    assert shared == {f"inner.{name}" for name in own}
    assert "inner.odd" in net.summary()


def test_any_parameter_can_be_kept_per_task(tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Around(nn.Sequential(Tokens(), nn.Linear(8, 8)))

    x = torch.randn(8, 6)
    net = taught(make(), x, per_task=["inner.0.cls_token", "*pos*", "first.weight"])
    assert {"inner.0.cls_token", "inner.0.pos_embed", "first.weight"} <= {*parts(net, TensorSpec)}
    assert_kept(net, x, make, tmp_path / "net")


def test_include_of_a_parameters_own_name_makes_it_a_matrix() -> None:
    module = Around(Tokens())
    net = rankup.grow(module, Rank(2, 1), base="keep", include=["first", "inner.odd"])
    assert list(parts(net, WeightSpec)) == ["inner.odd"]
    assert list(parts(net, FactoredSpec)) == ["first"]


def test_include_attention_factors_nothing_else() -> None:
    module = Around(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 16)
    net = rankup.grow(module, Rank(2, 1), base="keep", include="attention")
    factored = {*parts(net, FactoredSpec), *parts(net, WeightSpec)}
    assert factored
    assert all(name.startswith("inner.self_attn.") for name in factored)
    with pytest.raises(rankup.RankupError, match="include='attention' matches nothing"):
        rankup.grow(rankup.models.mlp(6, hidden=[8, 8]), Rank(2, 1), include="attention")


def test_shared_weight_has_one_set_of_factors_and_stays_shared(tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Around(Tied())

    x = torch.randn(8, 6)
    net = taught(make(), x)
    assert list(parts(net, WeightSpec)) == ["inner.one.weight"]
    assert "inner.words.weight" in dict(net.plan.dense.tensors) or (
        "inner.three.weight" in dict(net.plan.dense.tensors)
    )
    inner: Any = net.merged("b").get_submodule("inner")
    assert inner.one.weight is inner.two.weight
    assert inner.three.weight is inner.words.weight
    assert_kept(net, x, make, tmp_path / "net")


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_factors_go_on_the_weight_that_a_parametrization_makes(norm: Any, tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Around(norm(nn.Linear(8, 8)))

    x = torch.randn(8, 6)
    module = make().eval()
    weight = module.get_submodule("inner").weight.detach()  # type: ignore[union-attr]
    net = taught(module, x)
    (layer,) = (layer for layer in net.layers if layer.spec.name == "inner.weight")
    torch.testing.assert_close(layer.base()["weight"], weight)
    assert not any("parametrizations" in name for name, _ in net.named_parameters())
    merged = net.merged("a")
    if norm is parametrizations.weight_norm:  # made of what the module has
        assert merged.state_dict().keys() == make().state_dict().keys()
    assert_kept(net, x, make, tmp_path / "net")


def test_what_one_task_leaves_in_a_cache_does_not_answer_for_another(tmp_path: Path) -> None:
    x = torch.randn(8, 6)
    module = Around(Caching()).eval()
    module(x)  # fills the given module's own
    net = taught(module, x)
    first, second = net(x, task="a"), net(x, task="b")
    assert torch.equal(net(x, task="a"), first)
    assert torch.equal(net(x, task="b"), second)
    for task, answer in (("a", first), ("b", second)):
        assert relative_error(net.merged(task)(x), answer) < 1e-5


def test_weight_is_computed_once_in_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    from rankup.layers.parameter_layers import FactoredWeight

    net = taught(Around(SelfAttended(nn.MultiheadAttention(16, 2)), 16), torch.randn(4, 6))
    calls: list[str] = []
    matrix = FactoredWeight.matrix

    def counted(self: FactoredWeight, task: int) -> Tensor:
        calls.append(self.spec.name)
        return matrix(self, task)

    monkeypatch.setattr(FactoredWeight, "matrix", counted)
    net(torch.randn(4, 6), task="a")
    assert len(calls) == len({*calls}) > 0


def test_torchs_fast_path_gives_each_task_its_own_answers() -> None:
    inner = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    x = torch.randn(8, 6)

    class Sequences(Around):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.head(self.inner(torch.stack([x, x.relu()], 1))[:, 0])

    net = taught(Sequences(inner, 16), x)
    for task in ("a", "b", "a"):
        slow = net(x, task=task)
        with torch.inference_mode():
            fast = net(x, task=task)
        assert relative_error(fast, slow) < 1e-5
    assert relative_error(net.merged("b")(x), net(x, task="b")) < 1e-5


def test_network_may_take_over_the_modules_tensors() -> None:
    module = Around(Tokens())
    net = rankup.grow(module, Rank(2, 1), base="keep", copy=False)
    buffers = {tensor.data_ptr() for tensor in net.buffers()}
    for name in ("first.weight", "inner.odd", "inner.pos_embed"):
        assert module.get_parameter(name).data_ptr() in buffers, name
    copied = rankup.grow(module, Rank(2, 1), base="keep")
    assert not {t.data_ptr() for t in copied.buffers() if t.numel()} & {
        p.data_ptr() for p in module.parameters()
    }
    with pytest.raises(rankup.RankupError, match="copy=False .* needs base='keep'"):
        rankup.grow(module, Rank(2, 1), copy=False)


class Many(nn.Module):
    """Hundreds of layers with long names, of different kinds."""

    def __init__(self) -> None:
        super().__init__()
        names = [f"a_layer_with_a_name_that_is_long_enough_{'x' * (i % 40)}{i}" for i in range(200)]
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
        self.odd = nn.ParameterDict({name: torch.randn(3, 3) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x).relu()
        return x


@pytest.mark.filterwarnings("always")
def test_no_error_or_warning_is_longer_than_600_characters(
    recwarn: pytest.WarningsRecorder,
) -> None:
    rankup.grow(Many(), Rank(8, 2))
    assert len(recwarn) == 2
    assert all(len(str(warning.message)) <= 600 for warning in recwarn)
    rules = {"a": Rank(2, 1)}
    for options in ({"head": "none"}, {"rank": rules}, {"rank": Rank(1, 1, seeded=[1, 2])}):
        with pytest.raises(rankup.RankupError) as caught:
            rankup.grow(Many(), **{"rank": Rank(2, 1), **options})  # type: ignore[arg-type]
        assert len(str(caught.value)) <= 600
