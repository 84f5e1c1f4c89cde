"""Downloads from the Hugging Face Hub, by a client that stands in for its own."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from helpers.pictures import assert_same, hub_folder
from rankup.data import DataError, hub, load_source
from rankup.data.cache import cache_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Answer = Callable[[Path], object]


def fake_hub(
    monkeypatch: pytest.MonkeyPatch, answer: Answer, listed: Answer | None = None
) -> list[str]:
    """Stands in for the Hub's client; returns what was asked for.

    Args:
        answer: writes what arrives to a folder.
        listed: writes what the Hub has, if it is not what arrives.
    """
    asked = []

    def dataset_info(repository: str, **options: object) -> SimpleNamespace:
        assert options == {"files_metadata": True}
        with TemporaryDirectory() as folder:
            (listed or answer)(Path(folder))
            siblings = [
                SimpleNamespace(
                    rfilename=file.relative_to(folder).as_posix(),
                    lfs=SimpleNamespace(sha256=hashlib.sha256(file.read_bytes()).hexdigest()),
                )
                for file in Path(folder).rglob("*.parquet")
            ]
        readme = SimpleNamespace(rfilename="README.md", lfs=None)
        return SimpleNamespace(sha=COMMIT, siblings=[readme, *siblings])

    def snapshot_download(repository: str, **options: object) -> None:
        asked.append(repository)
        assert options["repo_type"] == "dataset"
        assert options["revision"] == COMMIT
        assert all(pattern.endswith("-*.parquet") for pattern in options["allow_patterns"])
        answer(Path(options["local_dir"]))

    monkeypatch.setattr("huggingface_hub.dataset_info", dataset_info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


def mnist(folder: Path) -> Path:
    return hub_folder(folder, where="mnist")


def test_download_happens_when_asked_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fake_hub(monkeypatch, mnist)
    with pytest.raises(DataError, match="--download"):
        load_source("mnist")
    assert asked == []
    source = load_source("mnist", download=True)
    assert asked == ["ylecun/mnist"]
    assert_same(load_source("mnist"), source)
    assert_same(load_source("mnist", download=True), source)
    assert asked == ["ylecun/mnist"]


def test_no_network_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise ConnectionError("Name or service not known\nand much more")

    fake_hub(monkeypatch, fail)
    with pytest.raises(DataError) as caught:
        load_source("cifar100", download=True)
    assert str(caught.value) == (
        "uoft-cs/cifar100 could not be downloaded from the Hugging Face Hub: Name or service not "
        "known"
    )


def test_interrupted_download_is_not_taken_for_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(folder: Path) -> None:
        (mnist(folder) / "mnist" / "train-00001-of-00002.parquet").unlink()

    fake_hub(monkeypatch, interrupted)
    with pytest.raises(DataError, match="incomplete: .* number 00001 is missing"):
        load_source("mnist", download=True)
    fake_hub(monkeypatch, mnist)
    assert len(load_source("mnist", download=True).train.y) == 12


def test_download_is_noted_with_commit_and_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, mnist)
    load_source("mnist", download=True)
    folder = cache_folder() / "hub" / "mnist"
    record = json.loads((folder / hub.RECORD).read_bytes())
    assert (record["repository"], record["revision"]) == ("ylecun/mnist", COMMIT)
    assert {name: noted["sha256"] for name, noted in record["files"].items()} == {
        f"mnist/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest()
        for file in (folder / "mnist").iterdir()
    }


def test_file_other_than_on_the_hub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(folder: Path) -> None:
        hub_folder(folder, where="mnist", seed=1)

    fake_hub(monkeypatch, other, listed=mnist)
    with pytest.raises(DataError, match="mnist/.*parquet arrived with the SHA-256 .*; try again$"):
        load_source("mnist", download=True)
    assert not (cache_folder() / "hub" / "mnist").exists()
    fake_hub(monkeypatch, mnist)
    load_source("mnist", download=True)


def test_files_of_another_commit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    left = cache_folder() / "hub" / ".mnist.tmp" / "mnist" / "train-00000-of-00003.parquet"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"from an interrupted download")
    fake_hub(monkeypatch, mnist)
    assert len(load_source("mnist", download=True).train.y) == 12


def change(what: str, folder: Path) -> None:
    file = folder / "mnist" / "test-00000-of-00001.parquet"
    record = folder / hub.RECORD
    match what:
        case "edited":
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
            os.utime(file, ns=(10**18, 10**18))
        case "pipe":
            file.unlink()
            os.mkfifo(file)
        case "missing":
            file.unlink()
        case "added":
            (folder / "mnist" / "train-00002-of-00003.parquet").write_bytes(file.read_bytes())
        case "other commit":
            record.write_text(record.read_text().replace(COMMIT, COMMIT[::-1]))
        case "no record":
            record.write_text("[]")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("edited", "test-00000-of-00001.parquet is not as it was downloaded"),
        ("pipe", "test-00000-of-00001.parquet is not as it was downloaded"),
        ("missing", "test-00000-of-00001.parquet is missing"),
        ("added", "train-00002-of-00003.parquet was not downloaded with the others"),
        ("other commit", "downloaded.json, which has the hashes of the files, is broken"),
        ("no record", "downloaded.json, which has the hashes of the files, is broken"),
    ],
)
def test_changed_download_is_refused(
    what: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_hub(monkeypatch, mnist)
    load_source("mnist", download=True)
    folder = cache_folder() / "hub" / "mnist"
    change(what, folder)
    with pytest.raises(DataError, match=f"{message}: delete .* again with --download$") as caught:
        load_source("mnist")
    assert "\n" not in str(caught.value)


def test_touched_download_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, mnist)
    source = load_source("mnist", download=True)
    with monkeypatch.context() as then:
        then.setattr(hub, "hash_regular", lambda file: pytest.fail(f"{file} was read"))
        load_source("mnist")
    for file in (cache_folder() / "hub" / "mnist").rglob("*.parquet"):
        file.touch()
    assert_same(load_source("mnist"), source)


def test_older_download_is_read_with_a_warning(tmp_path: Path) -> None:
    mnist(cache_folder() / "hub" / "mnist")
    with pytest.warns(UserWarning, match="mnist was downloaded by a version that kept no hashes"):
        source = load_source("mnist")
    mnist(tmp_path / "mine" / "mnist")
    assert_same(load_source("mnist", data=tmp_path / "mine"), source)  # with nothing to compare
