"""Inputs make batches of photos, texts and numbers, and can be stored as plain data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.pictures import encoded, pictures
from helpers.words import tokenizer_folder
from rankup.data import DataError, ImageInput, TensorInput, TextInput, make_stream
from rankup.data.inputs import from_json
from rankup.training.batches import as_floats, as_inputs
from rankup.training.recipe import Recipe

HASH = "0" * 64
EXAMPLES = [
    ImageInput(32),
    ImageInput(224, 1, 0.875, "center", (0.5,), (0.25,), "bicubic"),
    ImageInput(8, mean=(0.1, 0.2, 0.3), std=(1, 2, 3)),
    TextInput("user/model", HASH, 16, 3),
    TextInput("folder"),
    TensorInput((3, 4)),
    TensorInput((5,), "int64"),
]


@pytest.mark.parametrize("given", EXAMPLES, ids=str)
def test_json_round_trip(given: Any) -> None:
    data = json.loads(json.dumps(given.to_json()))
    assert from_json(data) == given
    assert hash(from_json(data)) == hash(given)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kind": "sound"}, "an input's kind is 'sound', expected one of image, text, tensor"),
        ({"kind": 3}, "expected an object with its kind"),
        ({"more": 1}, "an input of kind image has an unknown entry 'more'"),
        ({"size": None}, "size is None, expected a whole number from 1 to 4096"),
        ({"size": True}, "size is True"),
        ({"size": 10**9}, "size is 1000000000"),
        ({"channels": 2}, "channels is 2, expected one of 3, 1"),
        ({"crop": 0.0}, "crop is 0.0, expected a number from 0.1 to 1"),
        ({"crop": float("nan")}, "crop is nan"),
        ({"mean": [0, 0]}, "mean is [0, 0], expected a number for all or for each of 3 channels"),
        ({"mean": ["a"]}, "mean is 'a', expected a number"),
        ({"std": [0]}, "std is 0, expected a number from 1e-06"),
        ({"crop_mode": []}, "crop_mode is [], expected one of squash, center"),
        ({"interpolation": "magic"}, "interpolation is 'magic', expected one of lanczos"),
    ],
)
def test_wrong_images_from_files_are_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError) as refusal:
        from_json({**ImageInput(32).to_json(), **change})
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"kind": "text", "tokenizer": "a"}, "an input of kind text has no '"),
        ([], "an input is [], expected an object with its kind"),
        ({**TextInput("a").to_json(), "sha256": "00"}, "sha256 is '00', expected a SHA-256"),
        ({**TextInput("a").to_json(), "tokenizer": "\x1b[2J"}, "expected the path of a folder"),
        ({**TextInput("a").to_json(), "length": 10**9}, "length is 1000000000"),
        ({**TextInput("a").to_json(), "pad": -1}, "pad is -1"),
        ({**TensorInput((2,)).to_json(), "shape": [2**30, 2]}, "expected at most 1,073,741,824"),
        ({**TensorInput((2,)).to_json(), "shape": [0]}, "shape is 0"),
        ({**TensorInput((2,)).to_json(), "shape": "22"}, "shape is '22'"),
        ({**TensorInput((2,)).to_json(), "dtype": "object"}, "dtype is 'object'"),
    ],
)
def test_wrong_texts_and_numbers_from_files_are_refused(data: Any, sentence: str) -> None:
    with pytest.raises(DataError) as refusal:
        from_json(data)
    assert sentence in str(refusal.value)


def test_default_images_are_those_of_a_stream(tmp_path: Path) -> None:
    files = []
    for number, name in enumerate(("ant", "bee")):
        (tmp_path / name).mkdir()
        for index, image in enumerate(pictures(5, 9 + number, 14, 3, seed=number)):
            files.append(tmp_path / name / f"{index}.png")
            files[-1].write_bytes(encoded(image))
    task = make_stream(f"split:{tmp_path}@8", tasks=1)[0]
    tested = [files[4], files[9]]  # every fifth of each class
    by_class = {label: x for x, label in zip(task.test_x, task.test_y.tolist(), strict=True)}
    order = [task.class_names.index(name) for name in ("ant", "bee")]
    expected = torch.stack([by_class[label] for label in order])
    for recipe, given in (
        (Recipe(), ImageInput(8)),
        (Recipe(pixels="centred"), ImageInput(8, mean=(0.5,), std=(0.5,))),
    ):
        x = as_inputs(as_floats(expected, torch.float32), recipe, torch.float32)
        assert torch.equal(given.batch(tested), x)
        assert torch.equal(given.batch([file.read_bytes() for file in tested]), x)


def test_crop_takes_the_middle() -> None:
    image = np.zeros((40, 80, 3), dtype=np.uint8)
    image[10:30, 30:50] = (255, 0, 51)  # the middle half of a square of 40
    content = encoded(image)
    half = ImageInput(20, crop=0.5, crop_mode="center")
    assert half.batch([content])[0, :, 0, 0].tolist() == pytest.approx([1.0, 0.0, 0.2])
    assert half.batch([content]).unique().tolist() == pytest.approx([0.0, 0.2, 1.0])
    squashed = ImageInput(20, crop_mode="squash", interpolation="bilinear").batch([content])
    expected = np.asarray(Image.fromarray(image).resize((20, 20), Image.Resampling.BILINEAR))
    assert (squashed[0].permute(1, 2, 0) * 255).round().numpy().tolist() == expected.tolist()


def test_mean_and_deviation_of_each_channel() -> None:
    white = encoded(np.full((4, 4, 3), 255, dtype=np.uint8))
    x = ImageInput(4, mean=(0.5, 0.0, 1.0), std=(0.5, 2.0, 1.0)).batch([white])
    assert x[0, :, 0, 0].tolist() == [1.0, 0.5, 0.0]


def test_any_image_becomes_grey_or_rgb() -> None:
    seen = np.full((4, 4, 4), 0, dtype=np.uint8)  # transparent: white behind it
    for channels in (1, 3):
        x = ImageInput(4, channels).batch([encoded(seen), encoded(pictures(1, 6, 5)[0])])
        assert x.shape == (2, channels, 4, 4)
        assert x[0].unique().tolist() == [1.0]


def test_bad_images_get_a_sentence(tmp_path: Path) -> None:
    given = ImageInput(8, crop_mode="center")
    thread = encoded(np.zeros((1, 60_000, 3), dtype=np.uint8))
    for items, sentence in (
        ([], "a batch has at least one input, got none"),
        (b"abc", "a batch is a list of inputs, got bytes"),
        ([b"abc"], "image 1: the image is broken or in an unknown format"),
        ([3], "an image is given as bytes or a path, got int"),
        ([tmp_path / "none.png"], "none.png cannot be read: No such file or directory"),
    ):
        with pytest.raises(DataError) as refusal:
            given.batch(items)  # type: ignore[arg-type]
        assert sentence in str(refusal.value)
    with pytest.raises(DataError, match="60,000 times as long as wide"):
        ImageInput(224, crop_mode="center").batch([thread])


def test_texts_are_cut_and_padded(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    given = TextInput.of(tokenizer_folder(tmp_path / "words"), length=3)
    assert given.batch(["Red two", "blue", "one two three one", "purple"]).tolist() == [
        [2, 6, 0],
        [4, 0, 0],
        [5, 6, 7],
        [1, 0, 0],
    ]
    assert TextInput.of(tmp_path / "words", 2, pad=1).batch(["red"]).tolist() == [[2, 1]]
    for items, sentence in ((["a", 3], "text 2 is int"), (["a" * 2**21], "2,097,152 characters")):
        with pytest.raises(DataError, match=sentence):
            given.batch(items)  # type: ignore[arg-type]


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder = tokenizer_folder(tmp_path / "words")
    given = TextInput.of(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is another tokenizer than the network was made with"):
        given.batch(["red"])
    with pytest.raises(DataError, match="the tokenizer.json cannot be used"):
        TextInput(str(folder)).batch(["red"])
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="words has no tokenizer.json: write one with"):
        given.batch(["red"])


def test_missing_tokenizer_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    import huggingface_hub

    def offline(*_: str) -> str:
        raise OSError("no route\nto anywhere")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(DataError, match="to be had from the Hugging Face Hub: no route$"):
        TextInput("nobody/nothing").batch(["red"])


def test_numbers_stay_as_they_are() -> None:
    given = TensorInput((2,))
    rows = [[0.5, 1], np.array([2, 3], dtype=np.uint8), torch.tensor([4.0, 5.0])]
    assert given.batch(rows).tolist() == [[0.5, 1], [2, 3], [4, 5]]
    assert TensorInput((2,), "int64").batch([[1, 2]]).dtype == torch.int64
    for items, sentence in (
        ([[1]], r"input 1 is of shape \[1\], expected \[2\]"),
        ([[1, 2], "ab"], r"input 2 is not numbers of shape \[2\]"),
        ([[1, float("inf")]], "input 1 holds NaN or infinity"),
    ):
        with pytest.raises(DataError, match=sentence):
            given.batch(items)
    with pytest.raises(DataError, match="expected whole numbers"):
        TensorInput((1,), "int64").batch([[0.5]])
