"""Tables that name images are taught like the folders that hold these."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rankup
from helpers.calling import Call
from helpers.own_images import own_images
from rankup.data import DataError, image_tables

Rows = list[tuple[str, str]]
Write = Callable[[Path, Rows], Path]


def as_csv(root: Path, rows: Rows, name: str = "shoes.csv") -> Path:
    with open(root / name, "w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    return root / name


def as_paths(root: Path, rows: Rows) -> Path:
    columns = {"file_name": [path for path, _ in rows], "class": [name for _, name in rows]}
    pq.write_table(pa.table(columns), root / "shoes.parquet")
    return root / "shoes.parquet"


def as_bytes(root: Path, rows: Rows) -> Path:
    images = [(root / path).read_bytes() for path, _ in rows]
    pq.write_table(pa.table({"image": images, "label": [n for _, n in rows]}), root / "a.parquet")
    return root / "a.parquet"


def as_on_the_hub(root: Path, rows: Rows) -> Path:
    images = [{"bytes": (root / path).read_bytes(), "path": None} for path, _ in rows]
    names = sorted({name for _, name in rows})
    table = pa.table({"image": images, "label": [names.index(name) for _, name in rows]})
    about = {"info": {"features": {"label": {"names": names}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    (root / "hub").mkdir()
    pq.write_table(table, root / "hub" / "train-00000-of-00001.parquet")
    return root / "hub"


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    own_images(tmp_path / "photos", "boots", "sandals")
    files = sorted((tmp_path / "photos").rglob("*.png"))
    return [(str(file.relative_to(tmp_path)), file.parent.name) for file in files]


@pytest.mark.parametrize("write", [as_csv, as_paths, as_bytes, as_on_the_hub])
def test_table_teaches_the_same_as_folders(
    write: Write, rows: Rows, tmp_path: Path, call: Call
) -> None:
    for net in ("one", "two"):
        call("new", tmp_path / net, "--net", "mlp", "--size", "6", "--width", "16")
    told = []
    for net, data in (("one", tmp_path / "photos"), ("two", write(tmp_path, rows))):
        words = ("--name", "shoes", "--epochs", "40", "--json")
        done = call("learn", tmp_path / net, data, *words)
        assert done.code == 0, done.err
        told.append(json.loads(done.out))
    for key in ("classes", "train", "test", "accuracy", "broken"):
        assert told[0][key] == told[1][key]
    assert told[0]["classes"] == {"boots": 12, "sandals": 12}
    assert call("diff", tmp_path / "one", tmp_path / "two").code == 0  # to the bit


def test_table_is_tested_with(rows: Rows, tmp_path: Path, call: Call) -> None:
    net, table = tmp_path / "net", as_csv(tmp_path, rows)
    call("new", net, "--net", "mlp", "--size", "6", "--width", "16")
    assert call("learn", net, table, "--epochs", "40").code == 0
    assert sum(json.loads(call("test", net, table, "--json").out)["samples"].values()) == 24
    said = json.loads(call("predict", net, table, "--json").out)
    assert [answer["input"] for answer in said] == [str(tmp_path / path) for path, _ in rows]
    told = json.loads(call("test", net, table, "--held-out", "--json").out)
    assert told["accuracy"] == rankup.load(net).describe("shoes").accuracy


def test_train_and_test_tables_of_a_folder(rows: Rows, tmp_path: Path) -> None:
    as_csv(tmp_path, rows[::2], "train.csv")
    as_csv(tmp_path, rows[1::2], "test.csv")
    found = image_tables.find(tmp_path)
    assert found is not None
    assert [file for file, _ in found.train] == [tmp_path / path for path, _ in rows[::2]]
    assert len(found.test) == 12
    as_csv(tmp_path, rows, "more.csv")
    with pytest.raises(DataError, match="holds 3 tables of images, expected one, or two"):
        image_tables.find(tmp_path)


def test_missing_images_are_named_and_left_out(rows: Rows, tmp_path: Path, call: Call) -> None:
    call("new", tmp_path / "net", "--net", "mlp", "--size", "6", "--width", "16")
    table = as_csv(tmp_path, [*rows, ("photos/none.png", "boots")])
    done = call("learn", tmp_path / "net", table, "--epochs", "40")
    assert done.code == 0, done.err
    assert "Left out: " in done.out
    assert "none.png" in done.out


def test_table_of_something_else_beside_folders_is_left_alone(tmp_path: Path) -> None:
    photos = own_images(tmp_path / "photos", "a", "b")
    (photos / "prices.csv").write_text("item,price\nboots,3\n")
    (photos / "broken.parquet").write_text("no")
    assert image_tables.find(photos) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda rows: [("", "boots"), *rows], "row 0: there is no image"),
        (lambda rows: [*rows, (rows[0][0], "")], "row 24: there is no class"),
        (lambda rows: rows[:15], "has 3 images of class 'sandals', expected at least 5"),
        (lambda rows: rows[:13], "has 1 image of class 'sandals', expected at least 5"),
        (lambda rows: rows[:12], "has one class, 'boots', expected at least 2"),
    ],
)
def test_what_a_table_lacks_is_told(
    change: Callable[[Any], Rows], sentence: str, rows: Rows, tmp_path: Path, call: Call
) -> None:
    call("new", tmp_path / "net", "--net", "mlp", "--size", "6", "--width", "16")
    done = call("learn", tmp_path / "net", as_csv(tmp_path, change(rows)))
    assert done.code == 1
    assert sentence in done.err
    assert done.err.count("\n") == 1
