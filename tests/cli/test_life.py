"""The life of a network on the command line: made, taught, asked, tested, joined, emptied."""

import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rankup
from helpers.calling import Call, Done
from helpers.own_images import own_images
from helpers.pruned import drop
from helpers.pruned import grown as dropping
from rankup.cli.main import main
from rankup.data.inputs import ImageInput
from rankup.life import learning

QUICK = ("--epochs", "40")


def taught(call: Call, root: Path) -> Path:
    """A small network that has learned two tasks, the second by itself."""
    net = root / "net"
    assert call("new", net, "--net", "mlp", "--size", "6", "--width", "24").code == 0
    for name, classes, uses in (("first", "abcd", "all"), ("second", "xyz", "own")):
        images = own_images(root / "photos" / name, *classes)
        done = call("learn", net, images, "--uses", uses, *QUICK)
        assert done.code == 0, done.err
    return net


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same, made once: tests that change it take a copy."""
    root = tmp_path_factory.mktemp("life")
    patch = pytest.MonkeyPatch()

    def call(*words: object) -> Done:
        patch.setattr(sys, "argv", ["rankup", *map(str, words)])
        with pytest.raises(SystemExit) as exit:
            main()
        return Done(int(exit.value.code or 0), "", "")

    taught(call, root)
    yield root
    patch.undo()


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "life")


def test_new_network_is_empty_whole_and_knows_its_inputs(tmp_path: Path, call: Call) -> None:
    done = call("new", tmp_path / "net", "--size", "12", "--rank", "2,1", "--seed", "3")
    assert (done.code, done.err) == (0, "")
    net = rankup.load(tmp_path / "net")
    assert (net.tasks, net.inputs) == ([], ImageInput(12))
    assert (net.options.seed, net.options.rank) == (3, rankup.Rank(2, 1))
    assert call("verify", tmp_path / "net").code == 0
    again = call("new", tmp_path / "net")
    assert again.code == 1
    assert "holds a network already" in again.err


def test_learned_tasks_say_what_they_are(made: Path, call: Call) -> None:
    known = json.loads(call("tasks", made / "net", "--json").out)
    assert [task["name"] for task in known] == ["first", "second"]
    net = rankup.load(made / "net")
    for told, classes in zip(known, ("abcd", "xyz"), strict=True):
        assert told["class_names"] == list(classes)
        assert told["samples"] == 10 * len(classes)  # of 12, every fifth is held out
        assert told["accuracy"] >= 0.8
        assert told["inputs"]["size"] == 6
        assert told["saved"]
        assert "torch" in told["versions"]
        plain = json.loads(json.dumps(net.describe(told["name"]).to_json()))
        assert told == plain  # though no tensor was read
    table = call("tasks", made / "net").out
    assert "first" in table
    assert f"{known[0]['numbers']:,}" in table


def test_from_nothing_to_an_answer_in_two_commands(tmp_path: Path, call: Call) -> None:
    images = own_images(tmp_path / "photos", "dark", "light")
    done = call("learn", tmp_path / "net", images, "--epochs", "5", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["classes"] == {"dark": 12, "light": 12}
    assert (told["train"], told["test"]) == (20, 4)
    answer = call("predict", tmp_path / "net", images / "light" / "0.png", "--json")
    (seen,) = json.loads(answer.out)
    assert seen["classes"].keys() == {"dark", "light"}
    assert sum(seen["classes"].values()) == pytest.approx(1)


def test_prediction_is_the_networks_own(
    made: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted((made / "photos" / "second" / "y").iterdir())[:3]
    net = rankup.load(made / "net")
    with torch.no_grad():
        shares = net(ImageInput(6).batch(files), task="second").softmax(1)
    said = json.loads(call("predict", made / "net", *files, "--task", "second", "--json").out)
    for row, told in zip(shares.tolist(), said, strict=True):
        assert [told["classes"][name] for name in "xyz"] == pytest.approx(row, abs=1e-6)
        assert list(told["classes"].values()) == sorted(told["classes"].values(), reverse=True)
    lines = call("predict", made / "net", *files, "--task", "2", "--csv").out.splitlines()
    assert lines[0] == "input,task,class,probability"
    assert [line.split(",")[:2] for line in lines[1:]] == [[str(f), "second"] for f in files]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n".join(map(str, files)) + "\n \n"))
    assert call("predict", made / "net", "-", "--task", "second", "--csv").out.split() == lines
    folder = call("predict", made / "net", files[0].parent, "--task", "second", "--csv").out
    assert len(folder.split()) == 1 + 12


def test_network_with_a_router_guesses_the_task(tmp_path: Path, call: Call) -> None:
    net, images = tmp_path / "net", tmp_path / "photos"
    options = ("--net", "mlp", "--size", "6", "--width", "24")
    assert call("new", net, *options, "--router", "analytic,features=64").code == 0
    for name, classes in (("first", "ab"), ("second", "yz")):
        done = call("learn", net, own_images(images / name, *classes), "--name", name, *QUICK)
        assert done.code == 0, done.err
    asked = sorted((images / "second").rglob("*.png"))[:3]
    done = call("predict", net, *asked, "--json")
    assert done.code == 0, done.err
    for answer in json.loads(done.out):
        assert answer["task"] == "second"
        assert {*answer["classes"]} == {"y", "z"}
        assert 0.5 < answer["task_probability"] <= 1
        assert 0 <= answer["none"] <= 1
    # As the network answers without a task, in which the router has a say in the class, too.
    with torch.no_grad():
        shares = rankup.load(net)(ImageInput(6).batch(asked)).logits[:, 2:].softmax(1)
    said = [[answer["classes"][name] for name in "yz"] for answer in json.loads(done.out)]
    assert said == [pytest.approx(row, abs=1e-6) for row in shares.tolist()]
    assert "second" in call("predict", net, *asked).out
    told = call("predict", net, *asked, "--task", "first", "--json")
    assert {*json.loads(told.out)[0]["classes"]} == {"a", "b"}


def test_testing_counts_right_answers_by_class(made: Path, call: Call, tmp_path: Path) -> None:
    net, photos = made / "net", made / "photos" / "first"
    told = json.loads(call("test", net, photos, "--task", "first", "--held-out", "--json").out)
    accuracy = rankup.load(net).describe("first").accuracy
    assert told["accuracy"] == pytest.approx(accuracy)
    assert sum(told["samples"].values()) == 8
    shown = call("test", net, photos, "--task", "first").out
    assert "of 48" in shown
    # Classes by name, not by place: one folder alone, under the name of another class.
    (tmp_path / "swapped").mkdir()
    shutil.copytree(photos / "d", tmp_path / "swapped" / "a")
    told = json.loads(call("test", net, tmp_path / "swapped", "--task", "first", "--json").out)
    assert told["samples"] == {"a": 12}
    assert told["accuracy"] < 0.5
    (tmp_path / "swapped" / "a").rename(tmp_path / "swapped" / "d")
    told = json.loads(call("test", net, tmp_path / "swapped", "--task", "first", "--json").out)
    assert told["accuracy"] > 0.5
    (tmp_path / "swapped" / "d").rename(tmp_path / "swapped" / "owl")
    refused = call("test", net, tmp_path / "swapped", "--task", "first")
    assert "has a class 'owl', but task 'first' knows 'a', 'b', 'c', 'd'" in refused.err


def test_odd_and_broken_files_are_named_and_left_out(
    root: Path, tmp_path: Path, call: Call
) -> None:
    images = own_images(tmp_path / "more", "p", "q")
    (images / "p" / "notes.txt").write_text("not an image")
    (images / "q" / "3.png").write_bytes(b"broken")
    done = call("learn", root / "net", images, *QUICK)
    assert done.code == 0, done.err
    assert "No images, left out: p/notes.txt" in done.out
    assert "3.png: the image is broken" in done.out
    assert rankup.load(root / "net").describe("more").samples == 19


def test_dry_run_writes_nothing(root: Path, call: Call) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    images = root / "photos" / "first"
    assert (
        "'other' would be"
        in call("learn", root / "net", images, "--name", "other", "--dry-run").out
    )
    assert "'second' would go" in call("remove", root / "net", "second", "--dry-run").out
    assert "would get no task" in call("join", root / "net", root / "net", "--dry-run").out
    assert call("learn", root / "none", images, "--dry-run").code == 0
    left = {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.name != ".lock"}
    assert left == {path: when for path, when in before.items() if path.name != ".lock"}


def test_what_is_written_can_be_tried_and_told_as_json(root: Path, call: Call) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    net = root / "net"
    assert "would be a new network" in call("new", root / "none", "--dry-run").out
    assert "would be called 'X'" in call("rename", net, "first", "X", "--dry-run").out
    told = json.loads(call("info", net, "--json").out)
    assert [task["name"] for task in told["tasks"]] == ["first", "second"]
    assert told["tasks"][0]["numbers"] == rankup.load(net).size("first").total
    assert json.loads(call("verify", net, "--json").out)[0]["problems"] == []
    told = json.loads(call("remove", net, "second", "--dry-run", "--json").out)
    assert told["tasks"] == ["first"]
    told = json.loads(call("join", root / "other", net, "--dry-run", "--json").out)
    assert told["joined"] == ["first", "second"]
    left = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert left == before
    assert json.loads(call("rename", net, "first", "X", "--json").out)["title"] == "X"
    assert json.loads(call("new", root / "new", "--net", "mlp", "--json").out)["net"] == "mlp"
    (file,) = (net / "tasks").glob("first*")
    file.write_bytes(b"")
    done = call("verify", net, "--json")
    assert done.code == 1
    assert "truncated" in json.loads(done.out)[0]["problems"][0]


def test_stopped_learning_leaves_the_folder_as_it_was(
    root: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(learning, "accuracy", stop)  # after the task was committed in memory
    done = call("learn", root / "net", root / "photos" / "first", "--name", "third", *QUICK)
    assert done.code == 130
    assert done.err == "rankup: stopped; nothing was written\n"
    assert rankup.load(root / "net").tasks == ["first", "second"]
    done = call("learn", root / "none", root / "photos" / "first", "--epochs", "1")
    assert done.code in (1, 130)
    assert not (root / "none").exists()


def test_title_is_for_people(root: Path, call: Call) -> None:
    before = (root / "net" / "manifest.json").read_bytes()
    done = call("rename", root / "net", "first", "The first [one]", "--tags", "a, b")
    assert done.code == 0, done.err
    told = rankup.load(root / "net").describe("first")
    assert (told.title, told.tags) == ("The first [one]", ("a", "b"))
    assert "The first [one]" in call("tasks", root / "net").out
    assert (root / "net" / "manifest.json").read_bytes() == before
    assert "no task 'none'" in call("rename", root / "net", "none", "x").err
    done = call("rename", root / "net", "first", "--description", "All of it")
    assert "is now described anew" in done.out
    told = rankup.load(root / "net").describe("first")
    assert (told.title, told.description) == ("The first [one]", "All of it")
    assert "nothing to say of it" in call("rename", root / "net", "first").err


def test_removed_task_leaves_no_byte(root: Path, call: Call) -> None:
    net = root / "net"
    call("rename", net, "second", "Zweite")
    x = torch.rand(5, 3, 6, 6)
    before = rankup.load(net)(x, task="first")
    secrets = [path.read_bytes() for path in (net / "tasks").glob("second*")]
    assert call("remove", net, "second", "--yes").code == 0
    for path in (p for p in net.rglob("*") if p.is_file()):
        content = path.read_bytes()
        assert b"second" not in content
        assert b"Zweite" not in content
        assert content not in secrets
    assert torch.equal(rankup.load(net)(x, task="first"), before)
    assert call("verify", net).code == 0


def test_removal_asks_and_takes_no_for_an_answer(
    root: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    assert call("remove", root / "net", "second").code != 0
    assert rankup.load(root / "net").tasks == ["first", "second"]


def test_task_that_others_need_goes_only_with_them(root: Path, call: Call) -> None:
    images = own_images(root / "photos" / "third", "m", "n")
    assert call("learn", root / "net", images, "--uses", "first", *QUICK).code == 0
    known = json.loads(call("tasks", root / "net", "--json").out)
    net = rankup.load(root / "net")
    assert [task["uses"] for task in known] == [[], [], ["first"]]
    assert [task["numbers"] for task in known] == [net.size(name).total for name in net.tasks]
    refused = call("remove", root / "net", "first", "--yes")
    assert "'third' selects from its factors, and has to go first or with it" in refused.err
    assert call("remove", root / "net", "first", "third", "--yes").code == 0
    assert rankup.load(root / "net").tasks == ["second"]


def test_joined_tasks_keep_their_bits_and_inputs(root: Path, tmp_path: Path, call: Call) -> None:
    x = torch.rand(5, 3, 6, 6)
    other = rankup.load(root / "net")
    before = other(x, task="second")
    other.inputs = ImageInput(6, mean=(0.5,))  # what its tasks were prepared by
    other.remove_task("first")
    rankup.save(other, tmp_path / "other")
    call("remove", root / "net", "second", "--yes")
    assert call("diff", root / "net", tmp_path / "other").code == 1
    done = call("join", root / "net", tmp_path / "other")
    assert done.code == 0, done.err
    net = rankup.load(root / "net")
    assert net.tasks == ["first", "second"]
    assert torch.equal(net(x, task="second"), before)
    assert net.describe("second").inputs == ImageInput(6, mean=(0.5,))
    assert net.describe("first").inputs == ImageInput(6)


def test_join_makes_a_network_that_is_missing(root: Path, call: Call) -> None:
    assert call("join", root / "copy", root / "net").code == 0
    same = call("diff", root / "copy", root / "net")
    assert (same.code, same.out) == (0, "the same in both: first, second\n")


@pytest.mark.usefixtures("no_plots")
def test_tasks_of_a_run_answer_in_a_network_as_in_the_run(tmp_path: Path, call: Call) -> None:
    images = own_images(tmp_path / "images")
    words = (
        "--tasks",
        "2",
        "--epochs",
        "40",
        "--width",
        "16",
        "--pixels",
        "centred",
        "--lr",
        ".02",
    )
    stream = f"split:{images}@6"
    assert call("run", "--stream", stream, *words, "--out", tmp_path / "run").code == 0
    done = call("join", tmp_path / "net", tmp_path / "run")
    assert done.code == 0, done.err
    files = sorted(images.rglob("*.png"))[:6]
    asked = (*files, "--task", "1", "--plain")
    answers = call("predict", tmp_path / "run", *asked).out
    assert answers.count("\n") == 6
    assert call("predict", tmp_path / "net", *asked).out == answers


def test_differences_are_told(root: Path, call: Call) -> None:
    shutil.copytree(root / "net", root / "other")
    call("remove", root / "other", "second", "--yes")
    call("rename", root / "other", "first", "Another")
    told = call("diff", root / "net", root / "other")
    assert told.code == 1
    assert f"only in {root / 'net'}: second" in told.out
    assert "different: first (title)" in told.out
    call("new", root / "fresh", "--net", "mlp", "--size", "6", "--width", "16", "--seed", "7")
    grown = json.loads(call("diff", root / "net", root / "fresh", "--json").out)["grown"]
    assert grown.keys() == {"model", "seed"}
    refused = call("join", root / "net", root / "fresh")
    assert "grown alike" in refused.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("new NET", "holds a network already"),
        ("new x --net lenet", "net must be one of mlp, resnet18, timm:NAME"),
        ("new x --pretrained", "--pretrained is for published networks"),
        ("new x --rank many", "rank must be written like 11,1"),
        ("learn NET nowhere", "there is no folder nowhere"),
        (
            "learn NET PHOTOS --name first",
            "knows a task 'first' already: give this one another",
        ),
        ("learn NET PHOTOS --name x --uses none", "--uses names a task 'none', but the network"),
        ("learn NET EMPTY --name x", "holds no folders of images, expected one for each class"),
        ("learn NET ABOVE --name x", "holds no folders of images, but photos/first does"),
        ("test NET ABOVE --task first", "holds no folders of images, but photos/first does"),
        ("learn NET PHONE --name x", "webp, got phone/a/1.HEIC"),
        ("learn NET FEW --name x", "few/a has 1 image, expected at least 5"),
        ("learn NET CLASS --name x", "but images themselves: name the folder that it lies in, "),
        ("learn NET TEXTS --name x", "holds texts, but the network takes RGB images"),
        ("learn FILE/net PHOTOS --name x", "nothing can be saved to"),
        ("learn NET ONE --name x", "has one class, 'a', expected at least 2"),
        ("learn NET nowhere --name x --lr -1", "lr must be positive"),
        ("predict NET a.png", "knows 2 tasks; name one with --task: 'first', 'second'"),
        ("predict NET a.png --task none", "knows no task 'none', only 'first', 'second'"),
        ("predict NET a.png --task first", "a.png"),
        ("predict NET EMPTY --task first", "holds no images"),
        ("predict NET a --task first --csv --json", "exclude each other"),
        ("test NET nowhere --task first", "there is no folder nowhere"),
        ("remove NET none --yes", "there is no task 'none'"),
        ("join NET nowhere", "there is no folder nowhere"),
        ("diff NET EMPTY", "there is no network in"),
        ("tasks nowhere", "there is no folder nowhere"),
        ("tasks .", "there is no network in .: it has no manifest.json; there is one in net"),
        ("export NET --task first --out a.bin", "--out must end with .onnx"),
    ],
)
def test_bad_input_gets_one_sentence(
    words: str, sentence: str, root: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    (root / "empty").mkdir()
    shutil.copytree(root / "photos" / "first" / "a", root / "one" / "a")
    (root / "texts.csv").write_text("text,label\nhello,a\n")
    for name in ("phone/a/1.HEIC", "few/a/1.png"):
        (root / name).parent.mkdir(parents=True)
        (root / name).touch()
    places = {"NET": "net", "PHOTOS": "photos/first", "EMPTY": "empty", "ONE": "one"}
    places |= {"ABOVE": "photos", "CLASS": "photos/first/a", "TEXTS": "texts.csv"}
    places |= {"FILE/net": "texts.csv/net", "PHONE": "phone", "FEW": "few"}
    done = call(*(places.get(word, word) for word in words.split()))
    assert done.code == 1
    assert sentence in done.err
    assert done.err.count("\n") == 1
    assert done.err.startswith("rankup: ")


def test_network_that_knows_nothing_says_so(tmp_path: Path, call: Call) -> None:
    call("new", tmp_path / "net", "--net", "mlp", "--size", "4")
    assert "knows no task yet" in call("tasks", tmp_path / "net").out
    assert "knows no task yet" in call("predict", tmp_path / "net", "a.png").err


@pytest.mark.parametrize(
    "command",
    ["new", "learn", "predict", "test", "tasks", "export", "info", "verify", "push", "rename"],
)
def test_help_teaches_by_an_example(command: str, call: Call) -> None:
    assert f"Example: rankup {command} nets/shop" in " ".join(call(command, "--help").out.split())


def test_what_tasks_keep_is_told(tmp_path: Path, call: Call) -> None:
    net = dropping()
    for name in "ab":
        drop(net, name)
    rankup.save(net, tmp_path)
    kept = {name: vars(each) for name, each in net.describe("b").kept.items()}
    assert all(each == {"factors": 16, "of": 25, "own": 1} for each in kept.values())
    info = json.loads(call("info", tmp_path, "--json").out)
    assert info["tasks"][1]["kept"] == kept
    assert [task["numbers"] for task in info["tasks"]] == [net.size(t).total for t in net.tasks]
    assert json.loads(call("tasks", tmp_path, "--json").out)[1]["kept"] == kept
    shown = call("info", tmp_path).out
    assert "61–64" in shown  # of a layer: 14 of 23 factors in one task, 16 of 25 in the other
    assert "% kept" in call("tasks", tmp_path).out
    assert "as few as a task needs" in net.summary()


def test_new_network_can_drop_factors(tmp_path: Path, call: Call) -> None:
    net = tmp_path / "net"
    assert call("new", net, "--net", "mlp", "--size", "6", "--width", "24", "--prune").code == 0
    assert rankup.load(net).options.rank == rankup.Rank(11, 1, prune=True)
    images = own_images(tmp_path / "photos", "a", "b")
    refused = call("learn", net, images, *QUICK)
    assert refused.code != 0
    assert "a network that drops factors tests on 10% of them" in refused.err
    assert rankup.load(net).tasks == []
