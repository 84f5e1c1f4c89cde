"""Runs on images of one's own: where they are, what they are called, what is wrong with them."""

import html
import json
import shutil
from pathlib import Path

import pytest

from helpers.calling import Call
from helpers.own_images import own_images
from helpers.pictures import image_folder
from rankup.data import cache, folders, load_source
from rankup.errors import DataError
from rankup.runs.records import read_config

pytestmark = pytest.mark.usefixtures("no_plots")


def asked(folder: Path | str) -> tuple[object, ...]:
    return ("--stream", f"split:{folder}", "--tasks", 2, "--epochs", 40)


def config(run: Path) -> dict[str, object]:
    return read_config(run / "config.json")


def test_run_goes_on_where_its_images_have_moved(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    own_images(tmp_path / "here")
    assert call("run", *asked("here@5"), "--out", out).code == 0
    before = config(out)
    other = own_images(tmp_path / "other", *"bcda")
    again = call("run", "--resume", "--out", out, "--stream", f"split:{other}@5")
    assert f"the images of split:{other}@5 have changed since {out} was started" in again.err
    sized = call("run", "--resume", "--out", out, "--stream", "split:here")
    assert "was started with stream split:here@5, not split:here" in sized.err
    assert config(out) == before
    (tmp_path / "here").rename(tmp_path / "there")
    assert call("run", "--resume", "--out", out).code == 1
    moved = call("run", "--resume", "--out", out, "--stream", "split:there@5")
    assert moved.code == 0, moved.err
    assert config(out) == before | {"stream": "split:there@5"}


def test_keys_of_the_cache_stay_as_they_were(tmp_path: Path) -> None:
    layout = folders.find(image_folder(tmp_path / "é"))
    assert layout is not None
    expected = [b"3 None\n"]
    for file in layout.files:
        name = file.relative_to(layout.root).as_posix()
        expected += [f"{name} {file.stat().st_size}\n".encode(), file.read_bytes()]
    assert b"".join(cache._content(layout, None)) == b"".join(expected)


def test_run_shows_the_classes_of_its_tasks(call: Call, tmp_path: Path) -> None:
    classes = ("ant", "bee", "cow", "<dog>")
    out, images = tmp_path / "run", own_images(tmp_path / "images", *classes)
    done = call("run", *asked(images), "--out", out)
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_bytes().splitlines()]
    assert sorted(name for line in lines for name in line["classes"]) == sorted(classes)
    page = (out / "report.html").read_text()
    for line in lines:
        assert f"<small>{html.escape(', '.join(line['classes']))}</small>" in page


def test_images_inside_of_a_class_are_refused(tmp_path: Path) -> None:
    images = own_images(tmp_path / "images")
    (images / "b" / "more").mkdir()
    load_source(str(images))
    (images / "b" / "more" / "1.png").write_bytes((images / "b" / "1.png").read_bytes())
    with pytest.raises(DataError, match=r"more is a folder of images inside a class: put"):
        load_source(str(images))


def test_broken_link_and_single_class_are_named(call: Call, tmp_path: Path) -> None:
    images = own_images(tmp_path / "images")
    (images / "a" / "broken.png").symlink_to(tmp_path / "nowhere")
    done = call("run", *asked(images), "--out", tmp_path / "run")
    assert done.code == 1
    assert "broken.png cannot be read" in " ".join(done.err.split())
    for name in "bcd":
        shutil.rmtree(images / name)
    (images / "a" / "broken.png").unlink()
    done = call("run", *asked(images), "--out", tmp_path / "run")
    assert done.code == 1
    assert "images has 1 class, expected at least 2" in " ".join(done.err.split())


@pytest.mark.slow
def test_seeds_of_own_images_have_a_mean(call: Call, tmp_path: Path) -> None:
    images = own_images(tmp_path / "images")
    done = call("run", *asked(images), "--seeds", 2, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert "mean of 2" in " ".join(done.out.split())
    sums = {config(tmp_path / "run" / f"seed-{seed}")["data"] for seed in range(2)}
    assert len(sums) == 2  # their tasks are in different orders
