"""`rankup predict`: images are preprocessed as they were when the network was taught."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import rankup
from helpers.calling import Call, Done
from helpers.damage import edit_config
from helpers.own_images import own_images
from helpers.pictures import encoded, pictures
from rankup.cli.predict import _write_line
from rankup.data.sources import every_fifth

CLASSES = ("ant", "bee", "cow", "dog")


RESNET = {"net": "resnet18", "width": 4, "rank": "2,1", "epochs": 10}


def learned(images: Path, out: Path, size: str = "", **settings: Any) -> Path:
    """A run of two tasks on these images."""
    rankup.run(stream=f"split:{images}{size}", out=out, **{"tasks": 2, "epochs": 40} | settings)
    return out


def lines(run: Path) -> list[dict[str, list[str]]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]


def held_back(images: Path, classes: Sequence[str]) -> list[Path]:
    """The images that a task was tested with."""
    found = []
    for name in classes:
        files = sorted((images / name).iterdir(), key=lambda file: file.name)
        chosen = every_fifth(np.zeros(len(files), dtype=np.int64))
        found += [file for file, test in zip(files, chosen, strict=True) if test]
    return found


@pytest.mark.parametrize(
    ("settings", "size"), [({}, ""), ({"pixels": "centred"}, "@9"), (RESNET, "@12")]
)
def test_predictions_equal_what_was_measured(
    settings: dict[str, Any], size: str, call: Call, tmp_path: Path
) -> None:
    run = learned(own_images(tmp_path / "images", *CLASSES), tmp_path / "run", size, **settings)
    last = lines(run)[-1]["accuracy"]
    for number, line in enumerate(lines(run)):
        files = held_back(tmp_path / "images", line["classes"])
        done = call("predict", run, *files, "--task", line["task"], "--plain")
        assert done.code == 0, done.err
        said = [row.split("\t") for row in done.out.splitlines()]
        assert [name for name, _, _ in said] == [str(file) for file in files]
        right = [row[1] == file.parent.name for row, file in zip(said, files, strict=True)]
        assert sum(right) / len(right) == pytest.approx(last[number])
        assert all(0.5 <= float(share) <= 1 for _, _, share in said)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    learned(own_images(folder / "images", *CLASSES), folder / "run")
    return folder


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Path:
    """A run, with its images beside it."""
    return Path(shutil.copytree(begun, tmp_path / "mine")) / "run"


def test_table_names_the_class_and_the_next_best(call: Call, run: Path) -> None:
    one, other = lines(run)[1]["classes"]
    file = run.parent / "images" / one / "1.png"
    for name in ("2", "split 02"):
        done = call("predict", run, file, "--task", name)
        assert done.code == 0
        # The likelier first, which of two that are hardly learned is a matter of luck.
        assert f"{other} (" in done.out or f"{one} (" in done.out
        assert {one, other} <= {*done.out.replace("(", " ").split()}


def refused(done: Done, sentence: str) -> None:
    assert done.code == 1
    assert sentence in " ".join(done.err.split())
    assert len(done.err.splitlines()) == 1


def test_unanswerable_questions_are_refused(call: Call, run: Path) -> None:
    file = run.parent / "images" / "ant" / "1.png"
    classes = ", ".join(lines(run)[0]["classes"])
    refused(call("predict", run, file), f"name one with --task: 'split 01' ({classes}),")
    refused(call("predict", run, file, "--task", "3"), "knows no task '3', only 'split 01'")
    refused(call("predict", run, run / "no.png", "--task", "1"), "no.png cannot be read: No such")
    refused(call("predict", run, run / "config.json", "--task", "1"), "the image is broken or in")
    refused(call("predict", run / "net", file, "--task", "1"), "does not say what inputs")
    large = run.parent / "large.png"
    large.write_bytes(encoded(pictures(1, 9, 8, seed=0)[0]))
    refused(call("predict", run, large, "--task", "1"), "large.png: the image is")


def test_other_streams_and_methods_are_refused(call: Call, tmp_path: Path) -> None:
    file = own_images(tmp_path / "images") / "a" / "1.png"
    for method in ("rank", "finetune"):
        rankup.run(method, "p-digits", tasks=1, epochs=2, out=tmp_path / method)
    refused(call("predict", tmp_path / "rank", file), "changes the images in its own way")
    refused(call("predict", tmp_path / "finetune", file), "is a run of finetune, but only a run")
    shutil.rmtree(tmp_path / "rank" / "net")
    refused(call("predict", tmp_path / "rank", file), "changes the images")


def coloured(folder: Path, height: int, width: int) -> Path:
    """Four classes of RGB images."""
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for index, image in enumerate(pictures(12, height, width, 3, seed=number)):
            (folder / name / f"{index}.png").write_bytes(encoded(image // 4 + 48 * number))
    return folder


def test_images_are_brought_to_the_shape_of_the_run(call: Call, tmp_path: Path) -> None:
    square, wide = coloured(tmp_path / "square", 6, 6), coloured(tmp_path / "wide", 4, 9)
    own = learned(square, tmp_path / "run-square")
    learned(wide, tmp_path / "run-wide")
    name = lines(own)[0]["classes"][0]
    as_it_is = Image.open(square / name / "1.png")
    others = {
        "large.png": as_it_is.resize((12, 12), Image.Resampling.NEAREST),
        "clear.png": as_it_is.convert("RGBA"),
    }
    files = [square / name / "1.png"]
    for file, image in others.items():
        image.save(tmp_path / file)
        files.append(tmp_path / file)
    done = call("predict", own, *files, "--task", "1", "--plain")
    assert done.code == 0, done.err
    assert [row.split("\t")[1] for row in done.out.splitlines()] == [name] * 3
    # The same number of values in another shape is another image.
    turned = tmp_path / "turned.png"
    Image.open(wide / name / "1.png").transpose(Image.Transpose.ROTATE_90).save(turned)
    refused(
        call("predict", tmp_path / "run-wide", turned, "--task", "1"),
        "turned.png: the image is 4×9 RGB, but the run's were 9×4 RGB",
    )


def test_resnet_takes_images_that_are_not_square(call: Call, tmp_path: Path) -> None:
    images = coloured(tmp_path / "images", 6, 9)
    run = learned(images, tmp_path / "run", **RESNET)
    done = call("predict", run, images / lines(run)[0]["classes"][0] / "1.png", "--task", "1")
    assert done.code == 0, done.err


def test_damaged_run_gets_a_sentence(call: Call, run: Path) -> None:
    file = run.parent / "images" / lines(run)[0]["classes"][0] / "1.png"
    config, metrics = (run / "config.json").read_text(), (run / "metrics.jsonl").read_text()
    for name, value in (("recipe", None), ("stream", 5), ("inputs", [6, 6]), ("recipe", {"a": 1})):
        (run / "config.json").write_text(config)
        edit_config(run, **{name: value})
        refused(call("predict", run, file, "--task", "1"), "recipe" if name == "recipe" else name)
    (run / "config.json").write_text(config)
    first, *others = metrics.splitlines()
    (run / "metrics.jsonl").write_text("\n".join([json.dumps(json.loads(first) | {"classes": 3})]))
    for command in (("predict", run, file, "--task", "1"), ("report", run)):
        refused(call(*command), "'classes' is 3, not a list of names")
    for line in others, [first.replace("split 01", "split 05")]:
        (run / "metrics.jsonl").write_text("\n".join(line))
        refused(call("predict", run, file, "--task", "1"), "metrics.jsonl does not match its seal")
    (run / "metrics.jsonl").write_text(first)
    refused(call("predict", run, file, "--task", "1"), "lacks task 'split 02', which net/ has")


def test_plain_lines_keep_any_name(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    for name in (b"caf\xe9.png", b"a\tb\nc\\d.png"):
        _write_line(os.fsdecode(name), "bee")
    assert capsysbinary.readouterr().out == b"caf\xe9.png\tbee\na\\tb\\nc\\\\d.png\tbee\n"
