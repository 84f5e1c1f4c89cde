"""Images of one's own, wherever they are and whatever their folders are called."""

import html
import json
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from helpers.calling import Call
from helpers.own_images import (
    own_images,
)
from helpers.pictures import assert_same, image_folder
from rankup.data import cache, folders, load_source
from rankup.data.errors import DataError
from rankup.storage.atomic import json_bytes

CAFE = os.fsdecode(b"caf\xe9")  # Latin-1, as on older systems


def asked(folder: Path | str) -> tuple[object, ...]:
    return ("--stream", f"split:{folder}", "--tasks", 2, "--epochs", 40)


def config(run: Path) -> dict[str, object]:
    return dict(json.loads((run / "config.json").read_bytes()))


def test_a_run_whose_images_have_moved_goes_on(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    own_images(tmp_path / "here")
    assert call("run", *asked("here"), "--out", out).code == 0
    before = config(out)
    assert before["stream"] == "split:here"
    (tmp_path / "here").rename(tmp_path / "there")
    assert call("run", "--resume", "--out", out).code == 1
    moved = call("run", "--resume", "--out", out, "--stream", "split:there")
    assert moved.code == 0, moved.err
    assert config(out) == before | {"stream": "split:there"}
    assert "split:there" in (out / "report.html").read_text()
    assert call("run", "--resume", "--out", out).code == 0


def test_images_that_are_others_or_of_another_size_are_not_those_that_moved(
    call: Call, tmp_path: Path
) -> None:
    out, here = tmp_path / "run", own_images(tmp_path / "here")
    assert call("run", *asked(here), "--out", out).code == 0
    before = config(out)
    other = own_images(tmp_path / "other", *"bcda")
    again = call("run", "--resume", "--out", out, "--stream", f"split:{other}")
    assert f"the images of split:{other} have changed since {out} was started" in again.err
    sized = call("run", "--resume", "--out", out, "--stream", f"split:{here}@6")
    assert f"was started with stream split:{here}, not split:{here}@6" in sized.err
    known = call("run", "--resume", "--out", out, "--stream", "p-digits", "--tasks", 2)
    assert f"was started with stream split:{here}, not p-digits" in known.err
    assert config(out) == before


def test_where_no_checksum_is_known_images_must_stay_where_they_are(
    call: Call, tmp_path: Path
) -> None:
    out, here = tmp_path / "run", own_images(tmp_path / "here")
    assert call("run", *asked(here), "--out", out).code == 0
    (out / "config.json").write_text(json.dumps(config(out) | {"data": ""}))
    here.rename(tmp_path / "there")
    again = call("run", "--resume", "--out", out, "--stream", f"split:{tmp_path / 'there'}")
    assert f"was started with stream split:{here}, not split:" in again.err


def test_classes_may_have_names_of_any_bytes(tmp_path: Path, decodes: list[str]) -> None:
    folder = str(own_images(tmp_path / "mine", CAFE, "bar"))
    first = load_source(folder)
    assert first.class_names == ("bar", CAFE)
    decodes.clear()
    assert_same(load_source(folder), first)
    assert not decodes


def test_folders_may_have_names_of_any_bytes(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own_images(Path(CAFE), CAFE, *"bcd")
    done = call("run", *asked(CAFE))
    assert (done.code, done.err) == (0, "")
    (out,) = Path("runs").iterdir()
    assert out.name.startswith("split-caf-")
    assert config(out)["stream"] == f"split:{CAFE}"
    assert "split:caf?" in (out / "report.html").read_text()
    again = call("run", "--resume", "--out", out)
    assert (again.code, again.err) == (0, "")
    own_images(Path("other"))
    assert call("run", *asked("other"), "--out", "r").code == 0
    assert call("report", "r", out, "--out", "both.html").code == 0  # plots name the streams, too
    compared = call("compare", *asked(CAFE), "--methods", "rank", "--out", "c")
    assert compared.code == 0, compared.err
    assert "split:caf?" in Path("c/table.csv").read_text()


def test_a_long_path_is_no_hindrance(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = own_images(tmp_path / ("a" * 120) / ("b" * 120) / "birds")
    done = call("run", *asked(folder))
    assert done.code == 0, done.err
    (out,) = Path("runs").iterdir()
    assert out.name.startswith("split-birds-")
    assert call("run", *asked(folder), "--resume").code == 0


def test_what_has_names_of_text_is_written_as_ever(tmp_path: Path) -> None:
    """Keys in caches and networks' files stay valid."""
    data = {"task": "é ± 数", "lr": 0.1}
    assert json_bytes(data) == (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()
    assert json.loads(json_bytes({"é": CAFE})) == {"é": CAFE}
    layout = folders.find(image_folder(tmp_path / "é"))
    assert layout is not None
    expected = [b"3 None\n"]
    for file in layout.files:
        name = file.relative_to(layout.root).as_posix()
        expected += [f"{name} {file.stat().st_size}\n".encode(), file.read_bytes()]
    assert b"".join(cache._content(layout, None)) == b"".join(expected)


@pytest.mark.parametrize("classes", [("ant", "bee", "cow", "<dog>"), ("ant", "bee", "cow", CAFE)])
def test_a_run_tells_which_classes_its_tasks_have(
    classes: tuple[str, ...], call: Call, tmp_path: Path
) -> None:
    out, images = tmp_path / "run", own_images(tmp_path / "images", *classes)
    done = call("run", *asked(images), "--out", out)
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_bytes().splitlines()]
    told = [name for line in lines for name in line["classes"]]
    assert sorted(told) == sorted(classes)
    assert [len(line["classes"]) for line in lines] == [2, 2]
    page = (out / "report.html").read_text()
    for line in lines:
        shown = ", ".join(line["classes"]).encode("utf-8", "replace").decode()
        assert f"<small>{html.escape(shown)}</small>" in page


def test_images_inside_of_a_class_are_not_left_out(tmp_path: Path) -> None:
    images = own_images(tmp_path / "images")
    (images / "b" / "more").mkdir()
    load_source(str(images))
    (images / "b" / "more" / "1.png").write_bytes((images / "b" / "1.png").read_bytes())
    with pytest.raises(DataError, match=r"more is a folder of images inside a class: put"):
        load_source(str(images))


def test_what_is_wrong_with_a_folder_of_images_is_named(call: Call, tmp_path: Path) -> None:
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


def test_an_image_too_large_to_be_read_is_not_called_broken(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    done = call("run", *asked(own_images(tmp_path / "images")), "--out", tmp_path / "run")
    assert done.code == 1
    assert "the image is too large to be read safely" in " ".join(done.err.split())


def test_seeds_of_ones_own_images_have_a_mean(call: Call, tmp_path: Path) -> None:
    images = own_images(tmp_path / "images")
    done = call("run", *asked(images), "--seeds", 2, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert "mean of 2" in " ".join(done.out.split())
    sums = {config(tmp_path / "run" / f"seed-{seed}")["data"] for seed in range(2)}
    assert len(sums) == 2  # their tasks are in different orders


@pytest.mark.parametrize("name", ["test", "validation", "valid", "val", "other"])
def test_what_a_folder_of_test_images_may_be_called(name: str, tmp_path: Path) -> None:
    for part in ("train", name):
        own_images(tmp_path / part)
    if name == "other":
        message = "train but no folder test or validation or valid or val beside it"
        with pytest.raises(DataError, match=message):
            folders.find(tmp_path)
    else:
        found = folders.find(tmp_path)
        assert found is not None
        assert len(found.test) == 48


def test_a_large_image_is_no_attack(call: Call, tmp_path: Path) -> None:
    own_images(tmp_path / "images")
    Image.new("L", (11000, 9000)).save(tmp_path / "images" / "a" / "large.png")
    stream = ("--stream", f"split:{tmp_path / 'images'}@6", "--tasks", 2, "--epochs", 40)
    done = call("run", *stream, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert "Image size" not in done.err
