"""What tasks say of themselves, and what people say of them."""

import json
from pathlib import Path

import pytest

import rankup
from helpers.zoo import hashes, taught
from rankup.data.inputs import ImageInput


@pytest.fixture
def net() -> rankup.IncrementalNet:
    return taught("mlp")


def test_fit_notes_how_a_task_was_learned(tmp_path: Path) -> None:
    task = rankup.data.make_stream("s-digits")[0]
    net = rankup.grow(rankup.models.mlp(64, hidden=[16]), rankup.Rank(2, 1), seed=3)
    rankup.fit(net, task, rankup.Recipe(epochs=4))
    net.inputs = ImageInput(8, channels=1)
    net.annotate(task.name, accuracy=0.75)
    rankup.save(net, tmp_path)
    for one in (net, rankup.load(tmp_path)):
        found = one.describe(task.name)
        assert found.class_names == task.class_names
        assert (found.samples, found.seed, found.accuracy) == (len(task.train_y), 3, 0.75)
        assert found.recipe is not None
        assert found.recipe["epochs"] == 4
        assert found.inputs == ImageInput(8, channels=1)
        assert found.uses == ()
        assert found.numbers == net.size(task.name).total


def test_notes_are_outside_of_the_networks_hash(net: rankup.IncrementalNet, tmp_path: Path) -> None:
    rankup.save(net, tmp_path / "plain")
    net.annotate("task 1", title="Shoes", description="From\nthe shop.", tags=["a", "b"])
    rankup.save(net, tmp_path / "noted")
    assert not (tmp_path / "plain" / "about.json").exists()
    noted = hashes(tmp_path / "noted")
    del noted["about.json"]
    assert noted == hashes(tmp_path / "plain")
    found = rankup.load(tmp_path / "noted").describe("task 1")
    assert (found.title, found.description, found.tags) == ("Shoes", "From\nthe shop.", ("a", "b"))
    assert found.saved.startswith("20")
    assert "torch" in found.versions


def test_notes_of_a_removed_task_are_gone(net: rankup.IncrementalNet, tmp_path: Path) -> None:
    net.annotate("task 2", title="Secret")
    net.annotate("task 1", title="Public")
    rankup.save(net, tmp_path)
    assert b"Secret" in (tmp_path / "about.json").read_bytes()
    net.remove_task("task 2")
    rankup.save(net, tmp_path)
    assert b"Secret" not in (tmp_path / "about.json").read_bytes()
    assert [file.name[:6] for file in sorted((tmp_path / "tasks").iterdir())] == [
        "task_0",
        "task_1",
    ]
    assert rankup.verify(tmp_path)


def test_damaged_notes_cost_only_the_notes(net: rankup.IncrementalNet, tmp_path: Path) -> None:
    net.annotate("task 1", title="Shoes")
    rankup.save(net, tmp_path)
    path = tmp_path / "about.json"
    path.write_text(path.read_text().replace("Shoes", "Boots"))
    assert "about.json does not match its seal" in str(rankup.verify(tmp_path))
    with pytest.warns(UserWarning, match="is loaded without its notes"):
        loaded = rankup.load(tmp_path)
    assert loaded.describe("task 1").title == ""
    path.write_text(json.dumps({"tasks": {"task 1": {"title": 3}}}))
    assert "about.json is truncated or edited" in str(rankup.verify(tmp_path))


def test_what_is_said_is_checked(net: rankup.IncrementalNet) -> None:
    for known, why in (
        ({"class_names": ["one"]}, "has 3 classes, but 1 names for them"),
        ({"accuracy": 93}, "from 0 to 1, got 93"),
        ({"colour": "red"}, "a task has no 'colour' to annotate, only accuracy"),
    ):
        with pytest.raises(rankup.RankupError, match=why):
            net.annotate("task 0", **known)
