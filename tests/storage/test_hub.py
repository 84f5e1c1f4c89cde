"""Networks on the Hugging Face Hub, with a stand-in for its client that keeps folders."""

import io
import json
import pickle
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from huggingface_hub import errors

import rankup
from helpers.calling import Call
from helpers.hub import FolderHub, failure
from helpers.zoo import assert_same_bits, hashes, inputs, logits, module, taught, teach
from rankup.data.inputs import TensorInput
from rankup.life import card
from rankup.life.pushing import plan_push

SHOP = "user/shop"
HF = f"hf://{SHOP}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderHub:
    return FolderHub(tmp_path / "hub", monkeypatch)


@pytest.fixture
def net(tmp_path: Path) -> rankup.IncrementalNet:
    torch.manual_seed(0)
    net = taught("mlp", base="keep")
    net.inputs = TensorInput((9,))
    net.annotate("task 0", title="The first")
    rankup.save(net, tmp_path / "net")
    return net


@pytest.fixture
def pushed(hub: FolderHub, net: rankup.IncrementalNet, tmp_path: Path, call: Call) -> FolderHub:
    done = call("push", tmp_path / "net", SHOP)
    assert (done.code, done.err) == (0, "")
    return hub


def learn_more(net: rankup.IncrementalNet, folder: Path, name: str = "more") -> None:
    teach(net, name, inputs("mlp"))
    rankup.save(net, folder)


def test_what_was_pushed_answers_with_the_same_bits(
    pushed: FolderHub, net: rankup.IncrementalNet, tmp_path: Path, call: Call
) -> None:
    x = inputs("mlp")
    assert_same_bits(logits(net, x), logits(rankup.load(HF), x))
    done = call("pull", SHOP, tmp_path / "pulled")
    assert (done.code, done.err) == (0, "")
    assert hashes(tmp_path / "pulled") == hashes(tmp_path / "net")
    assert_same_bits(logits(net, x), logits(rankup.load(tmp_path / "pulled"), x))
    assert rankup.verify(tmp_path / "pulled")


def test_only_what_changed_is_pushed_in_one_commit(
    pushed: FolderHub, net: rankup.IncrementalNet, tmp_path: Path, call: Call
) -> None:
    net.annotate("task 1", title="The second")
    learn_more(net, tmp_path / "net")
    told = json.loads(call("push", tmp_path / "net", SHOP, "--json").out)
    (more,) = (tmp_path / "net" / "tasks").glob("more*")
    expected = {f"tasks/{more.name}", "manifest.json", "about.json", "README.md"}
    assert told["uploads"].keys() == expected == pushed.uploaded[-1]
    assert len(pushed.commits[SHOP]) == 3  # with the one that makes the repository
    again = call("push", tmp_path / "net", SHOP)
    assert "holds all of" in again.out
    assert len(pushed.commits[SHOP]) == 3


def test_no_commit_has_a_manifest_without_its_files(
    pushed: FolderHub, net: rankup.IncrementalNet, tmp_path: Path, call: Call
) -> None:
    learn_more(net, tmp_path / "net")
    call("push", tmp_path / "net", SHOP)
    net.remove_task("more")
    rankup.save(net, tmp_path / "net")
    assert call("push", tmp_path / "net", SHOP, "--yes").code == 0
    assert not [*pushed.folder(SHOP).rglob("more*")]
    assert b'"more"' not in (pushed.folder(SHOP) / "manifest.json").read_bytes()
    _, *commits = pushed.commits[SHOP]  # the first one made the repository
    known = [rankup.load(f"{HF}@{commit}").tasks for commit in commits]
    assert list(map(len, known)) == [3, 4, 3]
    for commit in commits:
        assert rankup.verify(tmp_path / "hub" / "cache" / SHOP / commit)


def test_removal_on_the_hub_is_asked_for(
    pushed: FolderHub,
    net: rankup.IncrementalNet,
    tmp_path: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    net.remove_task("task 2")
    rankup.save(net, tmp_path / "net")
    assert call("push", tmp_path / "net", SHOP).code != 0
    assert rankup.load(HF).tasks == ["task 0", "task 1", "task 2"]
    assert "remove task 'task 2' there" in call("push", tmp_path / "net", SHOP, "--dry-run").out


def test_pull_fetches_only_what_is_missing(
    pushed: FolderHub, net: rankup.IncrementalNet, tmp_path: Path, call: Call
) -> None:
    call("pull", SHOP, tmp_path / "pulled")
    learn_more(net, tmp_path / "net")
    call("push", tmp_path / "net", SHOP)
    pushed.fetched.clear()
    told = json.loads(call("pull", SHOP, tmp_path / "pulled", "--json").out)
    (more,) = (tmp_path / "net" / "tasks").glob("more*")
    assert list(told["fetched"]) == [f"tasks/{more.name}"]
    assert {*pushed.fetched} == {"manifest.json", "about.json", f"tasks/{more.name}"}
    assert hashes(tmp_path / "pulled") == hashes(tmp_path / "net")
    damaged = tmp_path / "pulled" / "base.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert list(json.loads(call("pull", SHOP, tmp_path / "pulled", "--json").out)["fetched"]) == [
        "base.safetensors"
    ]
    assert rankup.verify(tmp_path / "pulled")


def test_loading_some_tasks_fetches_only_theirs(hub: FolderHub, tmp_path: Path, call: Call) -> None:
    net = taught("mlp", tasks=())
    for name in "abc":
        teach(net, name, inputs("mlp"), uses="own")
    rankup.save(net, tmp_path / "net")
    call("push", tmp_path / "net", SHOP)
    hub.fetched.clear()
    loaded = rankup.load(HF, tasks=["b"])
    assert loaded.tasks == ["b"]
    assert [name[6] for name in hub.fetched if name.startswith("tasks/")] == ["b"]
    with torch.no_grad():
        assert torch.equal(loaded(inputs("mlp"), task="b"), net(inputs("mlp"), task="b"))


def test_removal_here_is_asked_for(
    pushed: FolderHub,
    net: rankup.IncrementalNet,
    tmp_path: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    learn_more(net, tmp_path / "net", "mine")
    before = hashes(tmp_path / "net")
    assert "remove task 'mine' there" in call("pull", SHOP, tmp_path / "net", "--dry-run").out
    assert call("pull", SHOP, tmp_path / "net").code != 0
    assert hashes(tmp_path / "net") == before
    assert call("pull", SHOP, tmp_path / "net", "--yes").code == 0
    assert rankup.load(tmp_path / "net").tasks == ["task 0", "task 1", "task 2"]
    assert rankup.verify(tmp_path / "net")


@pytest.mark.parametrize("longer", [False, True])
def test_damaged_file_is_refused_and_the_network_stays(
    pushed: FolderHub, net: rankup.IncrementalNet, tmp_path: Path, call: Call, longer: bool
) -> None:
    call("pull", SHOP, tmp_path / "pulled")
    before = hashes(tmp_path / "pulled")
    learn_more(net, tmp_path / "net")
    call("push", tmp_path / "net", SHOP)
    (file,) = (pushed.folder(SHOP) / "tasks").glob("more*")
    content = file.read_bytes()
    file.write_bytes(content + b"?" if longer else content[:-1] + bytes([content[-1] ^ 1]))
    done = call("pull", SHOP, tmp_path / "pulled")
    assert done.code == 1
    assert "user/shop is damaged: tasks/more" in done.err
    assert done.err.count("\n") == 1
    assert hashes(tmp_path / "pulled") == before
    file.write_bytes(content)
    assert call("pull", SHOP, tmp_path / "pulled").code == 0
    assert hashes(tmp_path / "pulled") == hashes(tmp_path / "net")


def test_stopped_pull_leaves_the_network_that_was_there(
    pushed: FolderHub,
    net: rankup.IncrementalNet,
    tmp_path: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call("pull", SHOP, tmp_path / "pulled")
    before = hashes(tmp_path / "pulled")
    learn_more(net, tmp_path / "net")
    call("push", tmp_path / "net", SHOP)

    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rankup.storage.hub.write_file", stop)  # before the manifest
        assert call("pull", SHOP, tmp_path / "pulled").code == 130
    left = hashes(tmp_path / "pulled")
    assert before.items() <= left.items()
    assert rankup.verify(tmp_path / "pulled")
    assert call("pull", SHOP, tmp_path / "pulled").code == 0
    assert hashes(tmp_path / "pulled") == hashes(tmp_path / "net")
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".pull")]


def test_nothing_else_is_fetched_and_nothing_unpickled(
    pushed: FolderHub, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pytorch_model.bin", "tasks/evil.pkl", "modeling.py", "base.safetensors.pkl"):
        (pushed.folder(SHOP) / name).write_bytes(b"cos\nsystem\n(S'touch evil'\ntR.")

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert call("pull", SHOP, tmp_path / "pulled").code == 0
    assert rankup.load(HF).tasks == rankup.load(tmp_path / "pulled").tasks
    kinds = {Path(name).suffix for name in pushed.fetched}
    assert kinds == {".json", ".safetensors"}


def test_base_that_lies_in_another_folder_is_pushed(
    hub: FolderHub, net: rankup.IncrementalNet, tmp_path: Path, call: Call
) -> None:
    rankup.save(net, tmp_path / "second", base_from="../net")
    assert call("push", tmp_path / "second", SHOP).code == 0
    x = inputs("mlp")
    assert_same_bits(logits(net, x), logits(rankup.load(HF), x))
    assert call("pull", SHOP, tmp_path / "far" / "pulled").code == 0
    assert_same_bits(logits(net, x), logits(rankup.load(tmp_path / "far" / "pulled"), x))
    assert call("pull", SHOP, tmp_path / "second").code == 0  # which has its base elsewhere


def test_card_tells_what_tasks_know(
    hub: FolderHub, net: rankup.IncrementalNet, tmp_path: Path, call: Call
) -> None:
    net.annotate("task 1", accuracy=0.875, class_names=("a|b", "<i>"), title="Two: kinds\\")
    rankup.save(net, tmp_path / "net")
    call("push", tmp_path / "net", SHOP, "--private")
    assert hub.private[SHOP]
    text = (hub.folder(SHOP) / "README.md").read_text()
    yaml = pytest.importorskip("yaml")
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["library_name"] == "rankup"
    (result,) = front["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == 0.875
    assert result["task"]["name"] == "Two: kinds\\"
    assert f"| task 1 | 2 | 87.5% | {net.size('task 1').total:,} | task 0 |" in text
    assert "Classes: a\\|b, &lt;i&gt;." in text
    code = text.split("```")[1].removeprefix("python\n")
    assert code.count("\n") == 3
    names = {"x": inputs("mlp")}
    exec(code.replace("net(x", "answer = net(x"), names)  # what the card says works
    with torch.no_grad():
        assert torch.equal(names["answer"], net(inputs("mlp"), task="task 0").softmax(1))


def test_card_of_a_person_is_left_alone(
    pushed: FolderHub, net: rankup.IncrementalNet, tmp_path: Path, call: Call
) -> None:
    readme = pushed.folder(SHOP) / "README.md"
    readme.write_text(readme.read_text().replace(card.MARK, "") + "Mine.")
    learn_more(net, tmp_path / "net")
    told = json.loads(call("push", tmp_path / "net", SHOP, "--json").out)
    assert "README.md" not in told["uploads"]
    assert (pushed.folder(SHOP) / "README.md").read_text().endswith("Mine.")


def test_dry_run_changes_nothing(
    hub: FolderHub, net: rankup.IncrementalNet, tmp_path: Path, call: Call
) -> None:
    would = call("push", tmp_path / "net", SHOP, "--dry-run")
    assert "Would upload 7 files of" in would.out
    assert hub.commits == {}
    call("push", tmp_path / "net", SHOP)
    before = hashes(hub.folder(SHOP))
    learn_more(net, tmp_path / "net")
    told = json.loads(call("push", tmp_path / "net", SHOP, "--dry-run", "--json").out)
    assert told["commit"] is None
    assert hashes(hub.folder(SHOP)) == before
    call("pull", SHOP, tmp_path / "pulled", "--dry-run")
    assert not (tmp_path / "pulled").exists()


def test_push_that_another_overtook_is_refused(
    pushed: FolderHub, net: rankup.IncrementalNet, tmp_path: Path, call: Call
) -> None:
    learn_more(net, tmp_path / "net")
    pushed.before_commit = lambda: pushed._commit(SHOP, {"note.txt": b"mine"}, [])
    done = call("push", tmp_path / "net", SHOP)
    assert done.err == (
        "rankup: user/shop cannot be pushed to: somebody else has pushed meanwhile; run the "
        "command again\n"
    )
    pushed.before_commit = lambda: None
    plan = plan_push(tmp_path / "net", SHOP)
    pushed._commit(SHOP, {"note.txt": b"mine, again"}, [])  # while the user is being asked
    with pytest.raises(rankup.StoreError, match="somebody else has pushed meanwhile"):
        plan.carry_out()
    assert call("push", tmp_path / "net", SHOP).code == 0
    assert (pushed.folder(SHOP) / "note.txt").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("push NET shop", "is written user/name or user/name@revision, got 'shop'"),
        ("push NET user/shop@v2", "a push goes to the main branch: leave @v2 out"),
        ("push nowhere user/shop", "there is no folder nowhere"),
        ("push hub user/shop", "there is no network in hub"),
        ("push NET user/shop --private", "user/shop exists and is public"),
        ("push OTHER user/shop", "user/shop holds another network: push this one to"),
        ("push NET user/other", "user/other holds other files, such as config.json"),
        ("pull user/none", "there is no such repository, or your token may not read it"),
        ("pull user/shop@none", "it has no such revision"),
        ("pull user/other", "user/other on the Hugging Face Hub holds no network"),
        ("pull user/shop OTHER", "holds another network: pull this one to a folder of its own"),
        ("pull user/shop hub", "hub holds other files"),
    ],
)
def test_bad_input_gets_one_sentence(
    words: str,
    sentence: str,
    pushed: FolderHub,
    tmp_path: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    rankup.save(taught("mlp", rank=rankup.Rank(1, 1)), "other")
    pushed.create_repo("user/other")
    pushed._commit("user/other", {"config.json": b"{}"}, [])
    before = hashes(tmp_path / "net"), hashes(pushed.folder(SHOP))
    places = {"NET": "net", "OTHER": "other"}
    done = call(*(places.get(word, word) for word in words.split()))
    assert done.code == 1
    assert sentence in done.err
    assert done.err.count("\n") == 1
    assert (hashes(tmp_path / "net"), hashes(pushed.folder(SHOP))) == before


@pytest.mark.parametrize(
    ("token", "sentence"),
    [(None, "there is no valid token: log in with `hf auth login`"), ("read", "may not write")],
)
def test_token_that_may_not_write_is_told(
    token: str | None,
    sentence: str,
    hub: FolderHub,
    net: rankup.IncrementalNet,
    tmp_path: Path,
    call: Call,
) -> None:
    hub.token = token
    done = call("push", tmp_path / "net", SHOP)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert sentence in done.err


def test_no_connection_is_told_in_one_sentence(
    pushed: FolderHub, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise ConnectionError("Name or service not known\nand much more")

    monkeypatch.setattr(pushed, "model_info", fail)
    done = call("pull", SHOP, tmp_path / "pulled")
    assert done.err == (
        "rankup: user/shop on the Hugging Face Hub cannot be read: Name or service not known\n"
    )
    monkeypatch.setattr(pushed, "hf_hub_download", fail)
    with pytest.raises(rankup.StoreError, match="hf://user/shop cannot be loaded: Name or"):
        rankup.load(HF)

    def find_nothing(*_: object, **__: object) -> NoReturn:
        raise errors.LocalEntryNotFoundError("An error happened. Please check your connection.")

    monkeypatch.setattr(pushed, "hf_hub_download", find_nothing)
    with pytest.raises(rankup.StoreError, match="cannot be reached, and its cache does not hold"):
        rankup.load(HF)


def test_gated_repository_is_not_taken_for_a_missing_one(
    hub: FolderHub,
    net: rankup.IncrementalNet,
    tmp_path: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise failure(errors.GatedRepoError, 403)

    monkeypatch.setattr(hub, "model_info", fail)
    assert "access to it has to be asked for" in call("push", tmp_path / "net", SHOP).err


def test_network_of_ones_own_module_is_loaded_with_it(
    hub: FolderHub, tmp_path: Path, call: Call
) -> None:
    net = taught("transformer")
    rankup.save(net, tmp_path / "net")
    call("push", tmp_path / "net", SHOP)
    x = inputs("transformer")
    loaded = rankup.load(HF, module=module("transformer"))
    assert_same_bits(logits(net, x), logits(loaded, x))
    assert "module=Transformer()" in (hub.folder(SHOP) / "README.md").read_text()


def test_folders_and_addresses_are_not_mixed_up(net: rankup.IncrementalNet) -> None:
    with pytest.raises(rankup.StoreError, match="expected a folder: see `rankup push`"):
        rankup.save(net, HF)
    with pytest.raises(rankup.RankupError, match="user/name or user/name@revision"):
        rankup.load("hf://shop")
