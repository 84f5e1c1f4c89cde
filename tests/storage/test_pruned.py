"""Factors that tasks have dropped: what their files hold, and that they come back as they were."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import rankup
from helpers.pruned import drop, factored, grown
from helpers.zoo import assert_same_bits, hashes, inputs, logits, module
from rankup.layers.pruned import from_bits
from rankup.layers.rounding import STORES, Store
from rankup.net.kept_factors import KeptFactors
from rankup.net.size import stored_by_task
from rankup.storage.editing import joining, removal
from rankup.storage.manifest import File
from rankup.utils.seal import seal


def learned(*names: str, store: Store = "full", kind: str = "mlp") -> rankup.IncrementalNet:
    net = grown(store, kind)
    for name in names:
        drop(net, name, kind)
    return net.eval()


def tensors_of(folder: Path) -> list[dict[str, Tensor]]:
    return [safetensors.torch.load_file(path) for path in (folder / "tasks").iterdir()]


@pytest.mark.parametrize("kind", ["mlp", "convolutions", "transformer"])
@pytest.mark.parametrize("store", STORES)
def test_comes_back_bit_for_bit(store: Store, kind: str, tmp_path: Path) -> None:
    net, x = learned("a", "b", store=store, kind=kind), inputs(kind)
    rankup.save(net, tmp_path / "net")
    again = rankup.load(tmp_path / "net", module(kind))
    assert_same_bits(logits(net, x), logits(again, x))
    mixed = torch.tensor([0, 1, 1, 0, 1, 0])
    assert torch.equal(net(x, task=mixed), again(x, task=mixed))
    assert again.size() == net.size()
    for layer, loaded in zip(factored(net), factored(again), strict=True):
        for key in ("U", "V", "S"):
            assert torch.equal(getattr(layer, key), getattr(loaded, key))
    rankup.save(again, tmp_path / "again")
    assert hashes(tmp_path / "net") == hashes(tmp_path / "again")
    assert rankup.verify(tmp_path / "net")


@pytest.mark.parametrize("store", STORES)
def test_files_hold_what_was_kept_and_size_counts_it(store: Store, tmp_path: Path) -> None:
    net, whole = learned("a", "b", store=store), grown(store, prune=False)
    for name in "ab":
        drop(whole, name)
    rankup.save(net, tmp_path)
    held = sum(t.nbytes for tensors in tensors_of(tmp_path) for t in tensors.values())
    assert net.size().bytes == held == sum(net.size(task).bytes for task in net.tasks)
    assert net.size().bytes < whole.size().bytes
    layers = factored(net)
    for layer in layers:
        # Of 20 seeded and 3 own factors, 0, 3, … 21 and the last are dropped: 14 are left, of
        # which one is its own. Of 25 factors 0, 3, … 24, which leaves 16 and one own.
        assert net.describe("a").kept[layer.spec.name] == KeptFactors(14, of=23, own=1)
        assert net.describe("b").kept[layer.spec.name] == KeptFactors(16, of=25, own=1)
    assert net.size("a").selectors == 14 * len(layers)
    assert net.size("a").factors == sum(s.spec.inputs + s.spec.outputs for s in layers)
    assert net.size("a").biases == sum(s.spec.outputs // 2 for s in layers)
    weight, bias = 3 * layers[-1].spec.outputs, 3
    assert net.size("a").heads == weight // 2 + bias // 2
    assert sum(stored_by_task(net.plan.specs, net._tasks)) == net.size().total


def test_what_drops_nothing_takes_no_bits() -> None:
    nets = [grown(prune=prune) for prune in (True, False)]
    for net in nets:
        net.begin_task("a", 3)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.5)
        net.commit_task()
    assert nets[0].size() == nets[1].size()


def test_dropped_own_factors_are_zero_in_memory() -> None:
    net = learned("a")
    for layer in factored(net):
        assert torch.equal(layer.S[0] != 0, (torch.arange(23) % 3 != 0) & (torch.arange(23) < 22))
        own = layer.U[20:].abs().sum(1) > 0
        assert own.tolist() == [True, False, False]
        assert torch.equal(layer.V[20:].abs().sum(1) > 0, own)


@pytest.mark.parametrize("store", STORES)
def test_later_tasks_do_not_change_it(store: Store) -> None:
    net, x = learned("a", store=store), inputs("mlp")
    before = logits(net, x)
    drop(net, "b")
    assert_same_bits(before, logits(net.eval(), x)[:1])


def test_tasks_come_and_go(tmp_path: Path) -> None:
    nets, x = {}, inputs("mlp")
    for name in "ab":
        nets[name] = net = grown(base="keep")
        drop(net, name, uses="own")
        rankup.save(net.eval(), tmp_path / name)
    joining(tmp_path / "a", tmp_path / "b").carry_out()
    nets["a"].join(nets["b"])
    rankup.save(nets["a"], tmp_path / "joined")
    assert hashes(tmp_path / "a") == hashes(tmp_path / "joined")
    assert_same_bits(logits(nets["a"], x), logits(rankup.load(tmp_path / "a"), x))
    nets["a"].remove_task("b")
    removal(tmp_path / "a", ["b"]).carry_out()
    rankup.save(nets["a"], tmp_path / "joined")
    assert hashes(tmp_path / "a") == hashes(tmp_path / "joined")


def test_networks_are_not_joined_with_those_that_drop_nothing() -> None:
    nets = [grown(prune=prune, base="keep") for prune in (True, False)]
    for net, name in zip(nets, "ab", strict=True):
        drop(net, name, uses="own")
    with pytest.raises(rankup.RankupError, match="grown alike"):
        nets[0].join(nets[1])


def test_network_that_drops_nothing_says_nothing_of_it(tmp_path: Path) -> None:
    net = grown(prune=False)
    drop(net, "a")
    rankup.save(net, tmp_path)
    told = (tmp_path / "manifest.json").read_text()
    assert "prune" not in told
    assert "kept" not in json.loads(told)["tasks"][0]
    (tensors,) = tensors_of(tmp_path)
    assert not any(name.endswith(".kept") for name in tensors)


def edited(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((folder / "manifest.json").read_bytes())
    del data["sha256"]
    edit(data)
    (folder / "manifest.json").write_text(json.dumps({**data, "sha256": seal(data)}))


def of_first(data: dict[str, Any]) -> dict[str, int]:
    counts: dict[str, int] = next(iter(data["tasks"][0]["kept"].values()))
    return counts


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "more than there are": (lambda data: of_first(data).update(selector=24), "no such numbers"),
    "more own ones than there are": (lambda data: of_first(data).update(U=4), "no such numbers"),
    "more biases than there are": (lambda data: of_first(data).update(bias=999), "no such numbers"),
    "nothing of biases": (lambda data: of_first(data).pop("bias"), "no such numbers"),
    "others than in the file": (lambda data: of_first(data).update(selector=13), "not keep 13 of"),
    "all, other than the file": (
        lambda data: of_first(data).update(selector=23),
        r"is \[14\], not \[23\]",
    ),
    "other own ones": (lambda data: of_first(data).update(U=2), "does not keep 2 of U"),
    "nothing": (lambda data: data["tasks"][0].pop("kept"), "must say what it keeps"),
    "another layer": (lambda d: d["tasks"][0]["kept"].update(x={}), "must say what it keeps"),
    "halves": (lambda data: of_first(data).update(selector=0.5), "expected a whole number"),
    "a text": (lambda data: data["tasks"][0].update(kept="all"), "expected an object"),
    "millions of own ones": (
        lambda data: [part["rank"].update(first=10**8) for part in data["parts"] if "rank" in part],
        "bytes of memory beyond",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_manifest_that_keeps_something_else_is_refused(case: str, tmp_path: Path) -> None:
    edit, message = REFUSED[case]
    rankup.save(learned("a"), tmp_path)
    edited(tmp_path, edit)
    with pytest.raises(rankup.StoreError, match=message) as refused:
        rankup.load(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("bits", [[0, 0, 128], [1], [0, 0, 1, 0]])
def test_bits_that_do_not_fit_are_refused(bits: list[int]) -> None:
    """Three bytes for 23 factors: the last bit of the third is of none."""
    with pytest.raises(ValueError, match="more than 23 numbers|3 bytes for 23"):
        from_bits(torch.tensor(bits, dtype=torch.uint8), (23,))


def test_file_with_other_bits_is_refused(tmp_path: Path) -> None:
    """Other factors than the manifest counts, with hashes that fit."""
    rankup.save(learned("a"), tmp_path)
    (path,) = (tmp_path / "tasks").iterdir()
    with safetensors.safe_open(path, "pt") as file:
        about = file.metadata()
    tensors = safetensors.torch.load_file(path)
    name = next(name for name in tensors if name.endswith("selector.kept"))
    tensors[name][0] = 0
    content = safetensors.torch.save(tensors, about)
    path.write_bytes(content)
    written = File.of(f"tasks/{path.name}", content)
    edited(tmp_path, lambda data: data["tasks"][0].update(vars(written)))
    with pytest.raises(rankup.StoreError, match="does not keep 14 of selector"):
        rankup.load(tmp_path)
