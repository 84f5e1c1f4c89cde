"""Networks whose parts differ in dtype: a module in bfloat16 whose tasks learn in float32, a module
in float32 whose base is kept in bfloat16, and modules whose layers differ."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import rankup
from helpers.zoo import assert_same_bits, inputs, module, relative_error
from rankup.errors import RankupError
from rankup.rank import Rank

KINDS = ("mlp", "transformer", "convolutions")
HALF, FULL = torch.bfloat16, torch.float32


class Between(nn.Module):
    """A norm in float32 inside of a module in bfloat16, as some models have it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.float())
        return y.to(x.dtype)


class OwnNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def of_several_dtypes() -> nn.Module:
    torch.manual_seed(0)
    own = nn.Sequential(OwnNorm(8), nn.Linear(8, 8)).to(HALF)
    first, last = nn.Linear(5, 8).to(HALF), nn.Linear(8, 3).to(HALF)
    return nn.Sequential(first, Between(nn.LayerNorm(8)), own, nn.Tanh(), last)


def case(kind: str, how: str) -> tuple[nn.Module, Tensor, dict[str, Any]]:
    """A module, inputs for it, and options of grow."""
    torch.manual_seed(0)
    if kind == "several":
        return of_several_dtypes(), torch.randn(6, 4, 5).to(HALF), {}
    made, x = module(kind), inputs(kind)
    if how == "tasks in more":
        return made.to(HALF), x.to(HALF), {"dtype": FULL}
    return made, x, {"base_dtype": HALF}


CASES = [("several", ""), *((k, h) for k in KINDS for h in ("tasks in more", "base in less"))]


def taught(kind: str, how: str, **more: Any) -> tuple[rankup.IncrementalNet, Tensor]:
    made, x, options = case(kind, how)
    net = rankup.grow(made, Rank(2, 1, seeded=3), base="keep", **options, **more)
    for name in "abc":
        net.begin_task(name, 3)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        net.commit_task([x])
    return net.eval(), x


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_tasks_learn_in_one_dtype_and_answer_in_modules(kind: str, how: str) -> None:
    made, x, options = case(kind, how)
    expected = made.eval()(x)
    net = rankup.grow(made, Rank(2, 1, seeded=3), base="keep", **options).eval()
    net.begin_task("a", 3)
    assert {parameter.dtype for parameter in net.parameters()} == {FULL}
    answer = net(x, task="a")
    assert answer.dtype == expected.dtype
    answer.float().square().sum().backward()
    for parameter in net.parameters():
        assert parameter.grad is not None
    net.commit_task([x])
    kept = [layer.base_weight for layer in net.layers if hasattr(layer, "base_weight")]
    assert HALF in {weight.dtype for weight in kept if weight is not None}


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_forms_agree(kind: str, how: str) -> None:
    net, x = taught(kind, how)
    close = 0.02 if x.dtype == HALF else 1e-5
    ids = torch.arange(len(x)) % 3
    alone = torch.cat([net(x[i : i + 1], task=int(task)) for i, task in enumerate(ids)])
    assert relative_error(net(x, task=ids).float(), alone.float()) < close
    merged, given = net.merged("b"), case(kind, how)[0]
    assert relative_error(merged(x).float(), net(x, task="b").float()) < close
    dtypes = {name: p.dtype for name, p in given.named_parameters()}
    assert {name: p.dtype for name, p in merged.named_parameters()} == dtypes
    with torch.autocast("cpu", HALF):
        assert relative_error(net(x, task="b").float(), merged(x).float()) < 0.02


@pytest.mark.parametrize(("kind", "how"), CASES)
@pytest.mark.parametrize("store", ["full", "int8"])
def test_saved_and_loaded_with_same_bits(kind: str, how: str, store: Any, tmp_path: Path) -> None:
    net, x = taught(kind, how, store=store)
    rankup.save(net, tmp_path / "net")
    loaded = rankup.load(tmp_path / "net", case(kind, how)[0])
    before, after = dict(net.named_buffers()), dict(loaded.named_buffers())
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert_same_bits(after[name], tensor)
    for task in "abc":
        assert_same_bits(loaded(x, task=task), net(x, task=task))
    files = (load_file(path).values() for path in tmp_path.rglob("*.safetensors"))
    assert sum(tensor.nbytes for tensors in files for tensor in tensors) == net.size().bytes
    loaded.begin_task("d", 3)
    loaded.commit_task([x])
    rankup.save(loaded, tmp_path / "net")
    assert rankup.verify(tmp_path / "net", case(kind, how)[0])


def test_size_counts_bytes_of_each_dtype() -> None:
    sizes, less = {}, {"base_dtype": HALF}
    for options in ({}, less):
        module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        net = rankup.grow(module, Rank(2), base="keep", **options)
        sizes[bool(options)] = net.size()
    assert sizes[True].total == sizes[False].total
    assert sizes[False].bytes - sizes[True].bytes == 2 * 6 * 8  # of the first layer's weight


def test_manifest_says_dtypes_only_where_they_differ(tmp_path: Path) -> None:
    net, _ = taught("mlp", "base in less")
    rankup.save(net, tmp_path / "less")
    parts = json.loads((tmp_path / "less/manifest.json").read_text())["parts"]
    said = {part["name"]: part["dtypes"] for part in parts if "dtypes" in part}
    assert said
    assert {*map(str, said.values())} == {
        str({"computes": "float32", "learns": "float32", "keeps": "bfloat16"})
    }
    plain = rankup.grow(module("mlp"), Rank(2, 1), base="keep")
    rankup.save(plain, tmp_path / "plain")
    assert "dtypes" not in (tmp_path / "plain/manifest.json").read_text()


@pytest.mark.parametrize("how", ["tasks in more", "base in less"])
def test_fit_learns(how: str) -> None:
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    made, options = rankup.models.mlp(12, [16]), {"base_dtype": HALF}
    if how == "tasks in more":
        made, options = made.to(HALF), {"dtype": FULL}
    net = rankup.grow(made, Rank(4, 2), base="keep", **options)  # type: ignore[arg-type]
    recipe = rankup.Recipe(epochs=60, batch=16, lr=0.02)
    for name in "ab":
        task = rankup.data.Task(name, 3, x, y, x, y)
        assert rankup.accuracy(rankup.fit(net, task, recipe), task) > 0.8


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_network_stays_in_its_dtypes(to: torch.dtype) -> None:
    net, x = taught("mlp", "base in less")
    before = net(x, task="a")
    with pytest.raises(RankupError, match="a grown network stays in"):
        net.to(to)
    assert_same_bits(net(x, task="a"), before)


@pytest.mark.parametrize(
    ("made", "options", "why"),
    [
        (nn.Linear(4, 4), {"dtype": HALF}, "dtype=torch.bfloat16 cannot hold the numbers"),
        (nn.Linear(4, 4), {"dtype": torch.int8}, "dtype takes a floating-point dtype of torch"),
        (nn.Linear(4, 4), {"base_dtype": "x"}, "base_dtype takes a floating-point dtype of torch"),
        (nn.Linear(4, 4), {"base_dtype": torch.float64}, "is no less than the module's own"),
        (nn.Linear(4, 4), {"base": "new", "base_dtype": HALF}, "needs base='keep'"),
        (nn.Linear(4, 4).to(HALF), {"base": "new", "dtype": FULL}, "module must be in one dtype"),
        (nn.Linear(4, 4).to(HALF), {"store": "int8"}, "is for modules in float32 or float64"),
    ],
)
def test_what_cannot_work_is_refused(made: nn.Module, options: dict[str, Any], why: str) -> None:
    whole = nn.Sequential(made, nn.Linear(4, 3).to(made.weight.dtype))
    with pytest.raises(RankupError, match=why):
        rankup.grow(whole, Rank(2), **{"base": "keep", **options})
