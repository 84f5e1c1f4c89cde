"""Numbers in fewer bits: what is packed comes back bit for bit; networks keep their promises."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor, nn

import rankup
from helpers.zoo import assert_same_bits, blobs, inputs, logits, module, taught, teach
from rankup.growing.options import GrowOptions
from rankup.layers import rounding
from rankup.layers.rounding import STORES, Store
from rankup.layers.spec import DenseSpec, HeadSpec, NormSpec
from rankup.methods.base import Setting
from rankup.methods.options import RankOptions
from rankup.methods.rank import RankUpdate
from rankup.rank import Rank
from rankup.training.recipe import Recipe

HEAD = HeadSpec("head", inputs=4, bias=True)
SMALLER: list[Store] = ["float16", "int8"]
floats = st.floats(-(2.0**100), 2.0**100, width=32)
matrices = arrays.arrays(
    "f4", arrays.array_shapes(min_dims=1, max_dims=3, max_side=5), elements=floats
)


def grown(kind: str, store: Store) -> rankup.IncrementalNet:
    return taught(kind, (3, 3), Rank(3, 1, seeded=5), store=store)


@pytest.mark.parametrize("store", STORES)
@given(drawn=matrices)
def test_what_was_unpacked_packs_to_same_bits(store: Store, drawn: object) -> None:
    for dtype in (torch.float32, torch.float64):
        value = torch.tensor(drawn, dtype=dtype)
        packed = rounding.pack(HEAD, {"selector": value}, store)
        back = rounding.unpack(HEAD, "selector", packed, dtype)
        again = rounding.pack(HEAD, {"selector": back}, store)
        assert packed.keys() == again.keys()
        assert all(torch.equal(packed[name], again[name]) for name in packed)
        assert torch.equal(rounding.unpack(HEAD, "selector", again, dtype), back)
        layouts = rounding.layouts(HEAD, "selector", tuple(value.shape), store, dtype)
        assert {name: layout.shape for name, layout in layouts.items()} == {
            name: tuple(tensor.shape) for name, tensor in packed.items()
        }
        assert all(packed[name].dtype in layouts[name].dtypes for name in packed)


def test_every_scale_comes_back_with_all_its_bits() -> None:
    mantissas = torch.arange(0x3F800000, 0x40000000, dtype=torch.int32)  # all from 1 to below 2
    value = mantissas.view(torch.float32)[:, None]
    packed = rounding.pack(HEAD, {"weight": value}, "int8")
    back = rounding.unpack(HEAD, "weight", packed, value.dtype)
    again = rounding.pack(HEAD, {"weight": back}, "int8")
    assert torch.equal(packed["weight"], again["weight"])
    assert torch.equal(packed["weight.scale"], again["weight.scale"])


@given(drawn=matrices)
def test_byte_is_off_by_half_step_of_its_row_at_most(drawn: object) -> None:
    value = torch.tensor(drawn)
    (back,) = rounding.rounded(HEAD, {"selector": value}, "int8").values()
    rows = value.abs().flatten(1).amax(1) if value.dim() > 1 else value.abs().amax()
    step = rows.view(*rows.shape, *(1,) * (value.dim() - rows.dim())) / 127
    assert bool(((back - value).abs() <= 0.5001 * step + 2.0**-93).all())


def test_which_form_tensor_has() -> None:
    dense = DenseSpec((("stem.weight", (3, 3)),), ("stem.weight",), False)
    value = torch.randn(3, 3)
    assert rounding.pack(HEAD, {"weight": value}, "int8")["weight"].dtype == torch.int8
    assert rounding.pack(HEAD, {"bias": value[0]}, "int8")["bias"].dtype == torch.float16
    assert rounding.pack(dense, {"stem.weight": value}, "int8")["stem.weight"] is value
    body = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm([3]), nn.Linear(3, 2))
    net = rankup.grow(body, Rank(1, 1), head="2")
    (norm,) = (part.spec for part in net.parts if isinstance(part.spec, NormSpec))
    assert rounding.pack(norm, {"weight": value}, "int8")["weight"].dtype == torch.float16
    # Values that half precision cannot hold stay as they are.
    large = torch.tensor([1e6, 1.0])
    assert rounding.pack(HEAD, {"bias": large}, "float16")["bias"] is large
    assert rounding.rounded(HEAD, {"weight": torch.zeros(2, 3)}, "int8")["weight"].tolist() == (
        [[0.0] * 3] * 2
    )


@pytest.mark.parametrize("kind", ["mlp", "convolutions"])
@pytest.mark.parametrize("store", SMALLER)
def test_network_comes_back_bit_for_bit_and_forgets_nothing(
    kind: str, store: Store, tmp_path: Path
) -> None:
    net, x = grown(kind, store), inputs(kind)
    before = logits(net, x)
    rankup.save(net, tmp_path / "net")
    loaded = rankup.load(tmp_path / "net", module(kind)).eval()
    assert_same_bits(before, logits(loaded, x))
    for each in (net, loaded):
        teach(each, "one more", inputs(kind, seed=7))
        each.eval()
        assert_same_bits(before, logits(each, x)[:2])
    assert_same_bits(logits(net, x), logits(loaded, x))
    rankup.save(loaded, tmp_path / "net")
    assert rankup.verify(tmp_path / "net")


@pytest.mark.parametrize("kind", ["mlp", "convolutions"])
def test_size_is_what_files_hold(kind: str, tmp_path: Path) -> None:
    sizes = {}
    for store in STORES:
        net = grown(kind, store)
        rankup.save(net, tmp_path / store)
        held = 0
        for path in (tmp_path / store / "tasks").iterdir():
            content = path.read_bytes()
            header = int.from_bytes(content[:8], "little")
            held += len(content) - 8 - header
        sizes[store] = net.size().bytes
        assert sizes[store] == held == sum(net.size(task).bytes for task in net.tasks)
    assert sizes["full"] == 4 * net.size().total
    assert sizes["float16"] == sizes["full"] / 2
    assert sizes["int8"] < sizes["float16"]


def test_manifest_says_how_numbers_are_stored(tmp_path: Path) -> None:
    rankup.save(grown("mlp", "int8"), tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["growth"]["store"] == "int8"
    assert rankup.load(tmp_path, module("mlp")).options.store == "int8"


def test_bytes_cost_little_accuracy_and_are_counted_as_quarter() -> None:
    task = blobs(0, 12)
    right, stored_numbers = {}, {}
    for store in STORES:
        module, grow_options = (
            rankup.models.mlp(12, hidden=[16]),
            GrowOptions(Rank(0, 0, seeded=64)),
        )
        recipe, options = Recipe(epochs=30, batch=16, lr=0.02), RankOptions(store=store)
        setting = Setting(module, grow_options, recipe, 0, [task], options)
        method = RankUpdate(setting)
        method.learn(task, None, None)
        found: Tensor = method.predict(task.train_x, 0).argmax(1)
        right[store] = float((found == task.train_y).float().mean())
        stored_numbers[store] = method.footprint().parameters
    assert right["full"] > 0.9
    assert right["int8"] > right["full"] - 0.03
    # 64 selectors and a head of 3 × 16 in bytes, two scales' worth of floats, biases in half.
    assert stored_numbers["int8"] == (64 + 4 + 3 * 16 + 3 * 4 + 2 * (16 + 3)) / 4
    assert stored_numbers["full"] == 64 + 16 + 3 * 16 + 3


def test_what_cannot_be_stored_so_is_refused() -> None:
    with pytest.raises(rankup.RankupError, match="store must be one of full, float16, int8, got"):
        rankup.grow(module("mlp"), Rank(3, 1), store="int4")  # type: ignore[arg-type]
    with pytest.raises(rankup.RankupError, match="store='int8' is for modules in float32 or"):
        rankup.grow(module("mlp").to(torch.bfloat16), Rank(3, 1), store="int8")
    double = rankup.grow(module("mlp", torch.float64), Rank(3, 1), store="int8")
    assert (double.dtype, double.options.store) == (torch.float64, "int8")
