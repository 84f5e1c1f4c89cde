"""Sources are read right or refused in one sentence."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from helpers.pictures import assert_same, encoded, hub_folder, image_folder, pictures, write_parquet
from rankup.data import DataError, digits, load_source
from rankup.data.cache import cache_folder


def test_digits_are_split_by_class() -> None:
    source = digits()
    for split in (source.train, source.test):
        assert (split.x.dtype, split.y.dtype) == (np.uint8, np.int64)
        assert split.x.shape == (len(split.y), 1, 8, 8)
    counts = [np.bincount(split.y, minlength=10) for split in (source.train, source.test)]
    assert len(source.train.y) + len(source.test.y) == 1797
    assert np.all(np.abs(counts[1] / (counts[0] + counts[1]) - 0.2) < 0.005)
    train = {image.tobytes() for image in source.train.x}
    assert train.isdisjoint(image.tobytes() for image in source.test.x)
    assert (source.train.x.min(), source.train.x.max()) == (0, 255)
    assert_same(source, digits())


@pytest.mark.parametrize("where", ["data", ".", "plain_text"])
def test_parquet_in_the_hubs_layout(tmp_path: Path, where: str) -> None:
    source = load_source(str(hub_folder(tmp_path / "bugs", where=where)))
    assert source.name == "bugs"
    assert source.class_names == ("ant", "bee", "cow")
    np.testing.assert_array_equal(source.train.x, pictures(12, 5, 4)[:, None])
    np.testing.assert_array_equal(source.test.x, pictures(6, 5, 4)[:, None])
    assert source.train.y.tolist() == [0, 1, 2] * 4
    assert source.train.y.dtype == np.int64


def test_cifar_columns_without_class_names(tmp_path: Path) -> None:
    images = pictures(4, 6, 6, 3)
    content = [encoded(image, "WEBP", lossless=True) for image in images]
    for split in ("train", "validation"):
        file = tmp_path / "data" / f"{split}-00000-of-00001.parquet"
        write_parquet(file, content, [0, 3, 1, 2], columns=("img", "fine_label"))
    source = load_source(str(tmp_path))
    np.testing.assert_array_equal(source.test.x, images.transpose(0, 3, 1, 2))
    assert source.class_names == ("0", "1", "2", "3")


def test_test_split_comes_before_validation(tmp_path: Path) -> None:
    hub_folder(tmp_path)
    file = tmp_path / "data" / "validation-00000-of-00001.parquet"
    write_parquet(file, [encoded(pictures(1, 5, 4)[0])], [0], names=["ant", "bee", "cow"])
    assert len(load_source(str(tmp_path)).test.y) == 6


@pytest.mark.parametrize("test", ["test", "validation", "valid", "val"])
def test_image_folders_with_splits(test: str, tmp_path: Path) -> None:
    source = load_source(str(image_folder(tmp_path, "train", test)))
    assert source.class_names == ("ant", "bee")
    assert source.train.y.tolist() == source.test.y.tolist() == [0] * 5 + [1] * 5
    expected = np.concatenate([pictures(5, 4, 4, 3, seed=seed) for seed in (0, 1)])
    np.testing.assert_array_equal(source.train.x, expected.transpose(0, 3, 1, 2))


def test_every_fifth_image_is_for_testing_without_splits(tmp_path: Path) -> None:
    source = load_source(str(image_folder(tmp_path, count=11)))
    ants = pictures(11, 4, 4, 3).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(source.test.x[:2], ants[[4, 9]])
    np.testing.assert_array_equal(source.train.x[:9], np.delete(ants, [4, 9], axis=0))
    assert source.test.y.tolist() == [0, 0, 1, 1]


def test_class_may_be_called_train(tmp_path: Path) -> None:
    image_folder(tmp_path)
    (tmp_path / "ant").rename(tmp_path / "train")
    assert load_source(str(tmp_path)).class_names == ("bee", "train")


def test_hidden_and_other_files_are_ignored(tmp_path: Path) -> None:
    image_folder(tmp_path)
    (tmp_path / "ant" / "notes.txt").write_text("six legs")
    (tmp_path / "ant" / "._00.png").write_text("not an image")
    (tmp_path / ".git").mkdir()
    assert len(load_source(str(tmp_path)).train.y) == 8


def test_palettes_become_rgb_and_bitmaps_grey(tmp_path: Path) -> None:
    for mode, channels in (("P", 3), ("1", 1)):
        root = image_folder(tmp_path / mode)
        for file in root.rglob("*.png"):
            Image.open(file).convert(mode).save(file)
        assert load_source(str(root)).train.x.shape[1] == channels


def test_mini_imagenet_is_84_pixels_and_rgb(tmp_path: Path) -> None:
    images = [
        encoded(pictures(1, 100, 120, 3)[0], "JPEG"),
        encoded(pictures(1, 90, 60)[0], "JPEG"),
        encoded(exact := pictures(1, 84, 84, 3)[0]),
    ]
    for split, times in (("train", 2), ("validation", 1), ("test", 3)):
        file = tmp_path / "mini-imagenet" / "data" / f"{split}-00000-of-00001.parquet"
        write_parquet(file, images * times, [0, 1, 2] * times)
    source = load_source("mini-imagenet", data=tmp_path)
    assert source.train.x.shape == (6, 3, 84, 84)
    assert len(source.test.y) == 3  # the validation split
    np.testing.assert_array_equal(source.train.x[2], exact.transpose(2, 0, 1))


# Where data is


def test_named_data_is_found_by_argument_or_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_folder(tmp_path / "given" / "mnist")
    hub_folder(tmp_path / "set" / "mnist", train=6)
    monkeypatch.setenv("RANKUP_DATA", str(tmp_path / "set"))
    assert len(load_source("mnist").train.y) == 6
    source = load_source("mnist", data=tmp_path / "given")
    assert len(source.train.y) == 12
    assert source.name == "mnist"


def test_missing_data_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_source("cifar100", data=tmp_path)
    assert str(caught.value) == (
        f"cifar100 is not in {tmp_path / 'cifar100'}: say which folder it is in with --data PATH "
        "or RANKUP_DATA, or get it from the Hugging Face Hub with --download"
    )


def break_(what: str, root: Path) -> None:
    """Make one thing wrong with the small parquet data set, or with the image folder."""
    data, images = root / "data", root / "images"
    first, test = data / "train-00000-of-00002.parquet", data / "test-00000-of-00001.parquet"
    good = [encoded(image) for image in pictures(3, 5, 4)]
    names = ["ant", "bee", "cow"]
    match what:
        case "broken image":
            write_parquet(first, [*good[:2], good[2][:40]], [0, 1, 2], names=names)
        case "no image":
            write_parquet(first, [good[0], None, good[2]], [0, 1, 2], names=names)
        case "other size":
            write_parquet(test, [*good, encoded(pictures(1, 6, 4)[0])], [0, 1, 2, 0], names=names)
        case "label too high":
            write_parquet(test, good, [0, 3, 2], names=names)
        case "label negative":
            for file in data.iterdir():
                write_parquet(file, good, [0, 1, -1 if file == first else 2])
        case "labels are ids":
            for file in data.iterdir():
                write_parquet(file, good, [0, 1, 10**12 if file == test else 2])
        case "two divisions":
            write_parquet(data / "train-00000-of-00001.parquet", good, [0, 1, 2], names=names)
        case "no label":
            write_parquet(first, good, [0, None, 2], names=names)
        case "image column":
            write_parquet(first, good, [0, 1, 2], columns=("picture", "label"))
        case "image column type":
            pq.write_table(pa.table({"image": good, "label": [0, 1, 2]}), first)
        case "label column type":
            rows = [{"bytes": image} for image in good]
            pq.write_table(pa.table({"image": rows, "label": ["a", "b", "c"]}), first)
        case "empty split":
            write_parquet(test, [], [], names=names)
        case "other names":
            write_parquet(test, good, [0, 1, 2], names=["ant", "cow", "bee"])
        case "not parquet":
            test.write_bytes(b"hello")
        case "no test split":
            test.unlink()
        case "missing file":
            first.unlink()
        case "several data sets":
            data.rename(root / "one")
            hub_folder(root, where="two")
        case "broken file":
            (images / "test" / "bee" / "02.png").write_bytes(b"\x89PNG and nothing more")
        case "empty class":
            (images / "train" / "cow").mkdir()
        case "unknown class":
            (images / "test" / "bee").rename(images / "test" / "wasp")
        case "untested class":
            shutil.rmtree(images / "test" / "ant")
        case "no test folder":
            (images / "test").rename(root / "elsewhere")
        case "empty test folder":
            for file in (images / "test").rglob("*.png"):
                file.unlink()
        case "too few":
            image_folder(root / "few", count=4)
        case "empty folder":
            (root / "empty").mkdir()


@pytest.mark.parametrize(
    ("what", "folder", "message"),
    [
        ("broken image", "", "train-00000-of-00002.parquet, row 2: the image is broken"),
        ("no image", "", "train-00000-of-00002.parquet, row 1: there is no image"),
        (
            "other size",
            "",
            r"test-.*, row 3: the image is 4×6 grey, but the first one \(.*train-00000.*, row 0\) "
            "is 4×5 grey",
        ),
        ("label too high", "", "test-.*, row 1: label 3 is outside the 3 classes, 0 to 2"),
        ("label negative", "", "train-00000-.*, row 2: label -1 is outside the 3 classes"),
        (
            "labels are ids",
            "",
            "test-00000-.*, row 2: label 1000000000000 is outside the classes that 9 images can "
            "have, 0 to 8, and the files name no classes$",
        ),
        ("no label", "", "train-00000-.*, row 1: there is no label"),
        ("image column", "", "train-.* has no column 'image' or 'img', only picture, label"),
        ("image column type", "", "'image' is binary, expected a struct with the field 'bytes'"),
        ("label column type", "", "column 'label' is string, expected whole numbers"),
        ("empty split", "", "test-.*parquet holds no images: the split is empty"),
        ("other names", "", "test-.* names different classes than .*train-"),
        ("not parquet", "", "test-.* cannot be read as a parquet file: "),
        ("no test split", "", "no test or validation split: expected files named test-00000"),
        ("missing file", "", "is incomplete: of the files train-…-of-00002.parquet, number 00000"),
        (
            "two divisions",
            "",
            "holds one split divided in two ways, train-00000-of-00001.* and t",
        ),
        ("several data sets", "", "holds several data sets, one, two: give the path of one"),
        ("broken file", "images", r"images/test/bee/02.png: the image is broken"),
        ("empty class", "images", "images/train/cow holds no images, expected files of type"),
        ("unknown class", "images", "images/test/wasp: .*images/train has no class of that name"),
        (
            "untested class",
            "images",
            "images/test has no images of class 'ant', which .*images/train has$",
        ),
        (
            "no test folder",
            "images",
            "images has a folder train but no folder test or validation or valid",
        ),
        ("empty test folder", "images", "images/test holds no class .*: the split is empty"),
        ("too few", "few", "few/ant has 4 images, expected at least 5"),
        ("empty folder", "empty", "empty holds no data: expected parquet files"),
        ("", "nowhere", "no data set '.*nowhere': expected digits, mnist, cifar100, mini-imagenet"),
    ],
)
def test_bad_data_is_refused_in_one_sentence(
    what: str, folder: str, message: str, tmp_path: Path
) -> None:
    hub_folder(tmp_path)
    image_folder(tmp_path / "images", "train", "test")
    break_(what, tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        load_source(str(tmp_path / folder))
    assert "\n" not in str(caught.value)
    decoded = cache_folder() / "decoded"
    assert not [entry for entry in decoded.glob("*") if not entry.name.endswith(".lock")]


def test_as_many_classes_as_images_need_no_names(tmp_path: Path) -> None:
    images = [encoded(image) for image in pictures(2, 5, 4)]
    for split, labels in (("train", [3, 0]), ("test", [1, 2])):
        write_parquet(tmp_path / f"{split}-00000-of-00001.parquet", images, labels)
    assert load_source(str(tmp_path)).class_names == ("0", "1", "2", "3")
