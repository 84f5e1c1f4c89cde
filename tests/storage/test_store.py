"""A network folder is intact, or one sentence says what is wrong with it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rankup
from helpers.zoo import KINDS, assert_same_bits, hashes, inputs, logits, module, taught, teach
from rankup.layers import FactoredLayer, Tensors
from rankup.rank import Rank
from rankup.storage import saving
from rankup.storage.seal import seal


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    rankup.save(taught("mlp"), tmp_path / "net")
    return tmp_path / "net"


@pytest.mark.parametrize("base", ["new", "keep"])
@pytest.mark.parametrize("kind", KINDS)
def test_loaded_network_goes_on_as_saved_one_would(kind: str, base: str, tmp_path: Path) -> None:
    net = taught(kind, rank=Rank(1, 1, seeded=5), base=base, seed=3)
    rankup.save(net, tmp_path / "net")
    loaded = rankup.load(tmp_path / "net", module(kind)).eval()
    assert loaded.tasks == net.tasks
    assert loaded.classes == net.classes
    assert loaded.size() == net.size()
    x = inputs(kind, seed=8)
    assert_same_bits(logits(net, x), logits(loaded, x))
    for one in (net, loaded):
        teach(one, "next", x, selectors="previous", norms="previous")
    assert_same_bits(logits(net, x), logits(loaded, x))
    rankup.save(loaded, tmp_path / "net")
    rankup.save(net, tmp_path / "from the start")
    assert hashes(tmp_path / "net") == hashes(tmp_path / "from the start")


@pytest.mark.parametrize("kind", ["mlp", "resnet18"])
def test_built_in_models_come_back_from_manifest_alone(kind: str, tmp_path: Path) -> None:
    net = taught(kind, dtype=torch.float64, rank=Rank.proportional(0.5, 0.25, seeded="2x"))
    rankup.save(net, tmp_path / "net")
    state = torch.get_rng_state()
    loaded = rankup.load(tmp_path / "net").eval()
    assert torch.equal(torch.get_rng_state(), state)
    x = inputs(kind, dtype=torch.float64)
    assert_same_bits(logits(net, x), logits(loaded, x))


def test_other_modules_must_be_passed_and_must_fit(tmp_path: Path) -> None:
    rankup.save(taught("transformer"), tmp_path / "net")
    with pytest.raises(rankup.StoreError, match="a module of your own, a Transformer: pass one"):
        rankup.load(tmp_path / "net")
    with pytest.raises(rankup.StoreError, match="does not fit .* differ in .*attention.out"):
        rankup.load(tmp_path / "net", module("head_first"))
    with pytest.raises(rankup.StoreError, match="is in torch.float64, but the network is in"):
        rankup.load(tmp_path / "net", module("transformer", torch.float64))


def test_one_more_task_writes_one_file_and_touches_no_old_one(saved: Path) -> None:
    before = hashes(saved)
    times = {path: path.stat().st_mtime_ns for path in saved.rglob("*.safetensors")}
    net = rankup.load(saved)
    teach(net, "fine birds: 5", inputs("mlp"))
    rankup.save(net, saved)
    after = hashes(saved)
    assert set(after) - set(before) == {"tasks/fine_birds__5-6ef7e28c.safetensors"}
    assert {name for name in before if before[name] != after[name]} == {"manifest.json"}
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    assert rankup.load(saved).tasks[-1] == "fine birds: 5"


def test_saving_again_without_new_task_writes_nothing(saved: Path) -> None:
    times = {path: path.stat().st_mtime_ns for path in saved.rglob("*") if path.is_file()}
    net = rankup.load(saved)
    rankup.save(net, saved)
    after = {path: path.stat().st_mtime_ns for path in saved.rglob("*") if path.is_file()}
    del times[saved / ".lock"], after[saved / ".lock"]
    assert after == times


def test_equal_networks_have_equal_folders(tmp_path: Path) -> None:
    for name in ("one", "two"):
        rankup.save(taught("resnet18", rank=Rank(1, 1, seeded=4)), tmp_path / name)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")
    text = (tmp_path / "one" / "manifest.json").read_text()
    assert str(tmp_path) not in text


def test_network_without_tasks_can_be_saved(tmp_path: Path) -> None:
    rankup.save(rankup.grow(module("mlp"), Rank(2, 1)), tmp_path / "net")
    net = rankup.load(tmp_path / "net")
    assert net.tasks == []
    teach(net, "first", inputs("mlp"))


def test_one_network_in_two_folders_of_different_age(tmp_path: Path) -> None:
    net = taught("mlp", tasks=[3])
    rankup.save(net, tmp_path / "old")
    teach(net, "second", inputs("mlp"))
    rankup.save(net, tmp_path / "new")
    rankup.save(net, tmp_path / "old")
    assert hashes(tmp_path / "old") == hashes(tmp_path / "new")


def test_changed_network_is_saved_as_it_is(tmp_path: Path) -> None:
    net = rankup.grow(rankup.models.mlp(8, hidden=[8]), rankup.Rank(2, 1))
    net.begin_task("a", 2)
    net.commit_task()
    rankup.save(net, tmp_path / "before")
    state = net.body.state_dict()
    net.body.load_state_dict({name: 2 * tensor for name, tensor in state.items()})
    rankup.save(net, tmp_path / "after")
    x = torch.rand(3, 8)
    assert torch.equal(rankup.load(tmp_path / "after").eval()(x, "a"), net.eval()(x, "a"))


def first_task(folder: Path) -> Path:
    return folder / "tasks" / "task_0-d2b7b301.safetensors"


def edit_manifest(folder: Path, change: Callable[[dict], None], reseal: bool = True) -> None:
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    del data["sha256"]
    old_seal = seal(data)
    change(data)
    path.write_text(json.dumps({**data, "sha256": seal(data) if reseal else old_seal}))


def flip_a_bit(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def swap_tasks(folder: Path) -> None:
    def change(data: dict) -> None:
        data["tasks"].reverse()

    edit_manifest(folder, change)


def swap_names(folder: Path) -> None:
    """Swap the names of the first two tasks, and of their files."""

    def change(data: dict) -> None:
        one, two = data["tasks"][:2]
        data["tasks"][:2] = [
            {**one, "name": two["name"], "file": two["file"]},
            {**two, "name": one["name"], "file": one["file"]},
        ]

    one, two = first_task(folder), folder / "tasks" / "task_1-9c704230.safetensors"
    contents = one.read_bytes(), two.read_bytes()
    two.write_bytes(contents[0])
    one.write_bytes(contents[1])
    edit_manifest(folder, change)


def replace_by_foreign(folder: Path) -> None:
    other = folder.parent / "other"
    rankup.save(taught("mlp", seed=9), other)
    first_task(folder).write_bytes(first_task(other).read_bytes())


def point_outside(folder: Path) -> None:
    (folder.parent / "x.safetensors").write_bytes(first_task(folder).read_bytes())
    edit_manifest(folder, lambda data: data["tasks"][0].update(file="../x.safetensors"))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated task": (
        lambda f: os.truncate(first_task(f), 100),
        "task_0-d2b7b301.safetensors is truncated: 100 of",
    ),
    "edited task": (
        lambda f: flip_a_bit(first_task(f)),
        "task_0-d2b7b301.safetensors is not the file that was saved",
    ),
    "missing task": (lambda f: first_task(f).unlink(), "task_0-d2b7b301.safetensors is missing"),
    "foreign task": (
        replace_by_foreign,
        "task_0-d2b7b301.safetensors is not the file that was saved",
    ),
    "truncated manifest": (
        lambda f: os.truncate(f / "manifest.json", 300),
        "manifest.json is truncated or edited",
    ),
    "empty manifest": (
        lambda f: os.truncate(f / "manifest.json", 0),
        "manifest.json is truncated or edited",
    ),
    "foreign manifest": (
        lambda f: (f / "manifest.json").write_text('{"name": "a web app"}'),
        "manifest.json is not the manifest of a rankup network",
    ),
    "a list for a manifest": (
        lambda f: (f / "manifest.json").write_text("[]"),
        "manifest.json is not the manifest of a rankup network",
    ),
    "missing manifest": (
        lambda f: (f / "manifest.json").unlink(),
        "there is no network in .*: it has no manifest.json",
    ),
    "newer format": (
        lambda f: edit_manifest(f, lambda data: data.update(version=3)),
        "format version 3, but this rankup reads versions 1 to 2: it was written by a newer rankup",
    ),
    "edited seed": (
        lambda f: edit_manifest(f, lambda d: d["growth"].update(seed=1), reseal=False),
        "manifest.json was edited",
    ),
    "edited seed, resealed": (
        lambda f: edit_manifest(f, lambda d: d["growth"].update(seed=1)),
        "seed 1 does not give the seeded factors that the network was trained with",
    ),
    "edited hash of the seeded factors": (
        lambda f: edit_manifest(f, lambda d: d["seeded"].update(sha256="0" * 64)),
        "seed 0 does not give the seeded factors",
    ),
    "unknown generator": (
        lambda f: edit_manifest(f, lambda d: d["seeded"].update(version=2)),
        "unknown generator",
    ),
    "edited hash of a task": (
        lambda f: edit_manifest(f, lambda d: d["tasks"][0].update(sha256="0" * 64)),
        "task_0-d2b7b301.safetensors is not the file that was saved",
    ),
    "tasks in another order": (swap_tasks, "holds another task than 'task 2': it says .*'uses'"),
    "tasks with each other's names": (swap_names, "holds another task than 'task 1'"),
    "a file outside the folder": (point_outside, "its file cannot be '../x.safetensors'"),
    "a part left out": (
        lambda f: edit_manifest(f, lambda d: d["parts"].pop(0)),
        "holds tensors that the network has no place for|does not give the seeded factors",
    ),
    "a field left out": (
        lambda f: edit_manifest(f, lambda d: d.pop("growth")),
        "manifest.json is not a valid manifest: it has no 'growth'",
    ),
    "other classes": (
        lambda f: edit_manifest(f, lambda d: d["tasks"][0].update(classes=9)),
        "task_0-d2b7b301.safetensors holds another task than 'task 0': it says .*'classes': 3",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folder_is_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "net"
    rankup.save(taught("mlp", rank=Rank(1, 1, seeded=5)), folder)
    assert rankup.verify(folder)
    change, message = BROKEN[case]
    change(folder)
    with pytest.raises(rankup.StoreError, match=message) as caught:
        rankup.load(folder)
    assert "\n" not in str(caught.value)
    found = rankup.verify(folder)
    assert not found
    assert str(caught.value) in found.problems


def test_verify_names_every_broken_file(saved: Path) -> None:
    os.truncate(saved / "tasks" / "task_0-d2b7b301.safetensors", 10)
    (saved / "tasks" / "task_2-07144f0f.safetensors").unlink()
    found = rankup.verify(saved)
    assert found.tasks == ("task 0", "task 1", "task 2")
    assert [problem.rpartition("/")[2][:6] for problem in found.problems] == ["task_0", "task_2"]
    assert str(found) == "\n".join(found.problems)


def test_verify_says_what_is_whole(saved: Path) -> None:
    found = rankup.verify(saved)
    assert found.problems == ()
    assert str(found) == f"{saved} is whole: 3 tasks, every file as it was written"


def test_kept_base_is_checked_like_rest(tmp_path: Path) -> None:
    folder = tmp_path / "net"
    rankup.save(taught("mlp", base="keep"), folder)
    flip_a_bit(folder / "base.safetensors")
    assert "base.safetensors is not the file" in str(rankup.verify(folder))
    with pytest.raises(rankup.StoreError, match="base.safetensors is not the file"):
        rankup.load(folder)


@pytest.mark.parametrize("place", ["empty", "nowhere", "file"])
def test_loading_what_is_no_network(place: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    with pytest.raises(rankup.StoreError, match=f"there is no network in .*{place}"):
        rankup.load(tmp_path / place)
    assert not rankup.verify(tmp_path / place)


def test_loaded_state_is_not_taken_for_saved_files(saved: Path) -> None:
    net = rankup.load(saved)
    state = net.state_dict()
    net.load_state_dict({k: t + 1 if t.is_floating_point() else t for k, t in state.items()})
    with pytest.raises(rankup.StoreError, match="holds tasks that this network has not learned"):
        rankup.save(net, saved)


def test_saving_refuses_what_would_be_lost(saved: Path, tmp_path: Path) -> None:
    before = hashes(saved)
    net = rankup.load(saved)
    shorter = taught("mlp", tasks=[3, 2])
    rankup.save(shorter, saved)  # what it has not learned stays
    assert hashes(saved) == before
    other = rankup.grow(module("mlp"), Rank(2, 1))
    teach(other, "task 0", inputs("mlp", seed=7))
    with pytest.raises(rankup.StoreError, match="holds tasks that this network has not learned"):
        rankup.save(other, saved)
    with pytest.raises(rankup.StoreError, match="holds another network"):
        rankup.save(taught("mlp", seed=1), saved)
    with pytest.raises(rankup.StoreError, match="holds another network"):
        rankup.save(taught("mlp", rank=Rank(3, 1)), saved)
    net.begin_task("open", 2)
    with pytest.raises(rankup.StoreError, match="task 'open' is still being learned"):
        rankup.save(net, saved)
    assert hashes(saved) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("text")
    with pytest.raises(rankup.StoreError, match="holds other files"):
        rankup.save(shorter, tmp_path / "mine")
    with pytest.raises(rankup.StoreError, match="cannot save to .*thesis.tex"):
        rankup.save(shorter, tmp_path / "mine" / "thesis.tex")


def test_task_committed_during_save_is_saved_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = taught("mlp")
    known = net.tasks
    write = saving._to_bytes

    def committing(*args: object) -> bytes:
        if net.tasks == known:  # as another thread may
            teach(net, "meanwhile", inputs("mlp", seed=9))
        return write(*args)

    monkeypatch.setattr(saving, "_to_bytes", committing)
    rankup.save(net, tmp_path)
    assert rankup.verify(tmp_path).tasks == tuple(known)
    rankup.save(net, tmp_path)
    assert rankup.verify(tmp_path).tasks == (*known, "meanwhile")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model": {"model": "vit", "options": {}}},
            "model.model is 'vit', expected one of None, 'mlp'",
        ),
        ({"dtype": "nn"}, "dtype is 'nn', expected one of 'float16'"),
    ],
)
def test_manifest_of_what_is_not_known_is_refused(
    change: dict[str, object], message: str, saved: Path
) -> None:
    edit_manifest(saved, lambda data: data.update(change))
    with pytest.raises(rankup.StoreError, match=message):
        rankup.load(saved)


def test_loading_makes_each_table_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extended: list[int] = []
    extend = FactoredLayer.extended

    def counted(layer: FactoredLayer, *added: Tensors, **kwargs: Any) -> Tensors:
        extended.append(len(added))
        return extend(layer, *added, **kwargs)

    monkeypatch.setattr(FactoredLayer, "extended", counted)
    net = rankup.load(saved)
    assert extended == [len(net.tasks)] * len(net.plan.layers[:-1])


def test_folder_must_be_a_path() -> None:
    for call in (lambda: rankup.save(taught("mlp"), None), lambda: rankup.load(None)):
        with pytest.raises(rankup.StoreError, match="must be a path, got None"):
            call()
