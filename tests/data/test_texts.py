"""Texts in parquet and CSV files become streams of token ids."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from helpers.pictures import image_folder
from helpers.words import (
    COLOURS,
    NUMBERS,
    VOCABULARY,
    text_csv,
    text_folder,
    text_rows,
    tokenizer_folder,
)
from rankup.data import DataError, ImageInput, TextInput, make_stream

pytest.importorskip("tokenizers")


@pytest.fixture
def words(tmp_path: Path) -> TextInput:
    return TextInput.of(tokenizer_folder(tmp_path / "words"), length=3)


def test_a_task_for_each_domain(tmp_path: Path, words: TextInput) -> None:
    stream = make_stream(f"split:{text_folder(tmp_path / 'texts')}", inputs=words)
    assert {task.name for task in stream} == {"colours", "numbers"}  # none out of scope
    for task in stream:
        names = COLOURS if task.name == "colours" else NUMBERS
        assert task.class_names == tuple(sorted(f"{word}_intent" for word in names))
        assert (task.train_x.dtype, task.train_x.shape, len(task.test_y)) == (
            torch.int64,
            (18, 3),
            6,
        )
        for ids, label in zip(task.train_x.tolist(), task.train_y.tolist(), strict=True):
            word = VOCABULARY.index(task.class_names[label].removesuffix("_intent"))
            assert ids == [word, word, 0]


def test_order_of_tasks_is_the_seeds(tmp_path: Path, words: TextInput) -> None:
    name = f"split:{text_folder(tmp_path / 'texts')}"
    orders = {
        tuple(task.name for task in make_stream(name, inputs=words, seed=seed)) for seed in range(8)
    }
    assert orders == {("colours", "numbers"), ("numbers", "colours")}
    first = make_stream(name, inputs=words)[0].name
    assert [task.name for task in make_stream(name, inputs=words, tasks=1)] == [first]
    with pytest.raises(DataError, match="3 tasks were asked for, but texts has 2: colours, num"):
        make_stream(name, inputs=words, tasks=3)


def test_without_domains_classes_are_divided(tmp_path: Path, words: TextInput) -> None:
    name = f"split:{text_folder(tmp_path / 'texts', without='domain')}"
    stream = make_stream(name, inputs=words, tasks=3)
    assert [task.classes for task in stream] == [2, 2, 2]
    assert len({each for task in stream for each in task.class_names}) == 6
    with pytest.raises(DataError, match="needs a number of tasks"):
        make_stream(name, inputs=words)


def test_few_samples_of_each_class(tmp_path: Path, words: TextInput) -> None:
    name = f"split:{text_folder(tmp_path / 'texts')}"
    for task in make_stream(name, inputs=words, per_class=2):
        assert task.train_y.bincount().tolist() == [2, 2, 2]
        assert len(task.test_y) == 6
    assert len(make_stream(name, inputs=words, per_class=100)[0].train_y) == 18
    photos = image_folder(tmp_path / "photos", "train", "test")
    drawn = [make_stream(f"split:{photos}", tasks=1, seed=s, per_class=2)[0] for s in (0, 0, 1, 2)]
    assert drawn[0].train_y.bincount().tolist() == [2, 2]
    assert torch.equal(drawn[0].train_x, drawn[1].train_x)
    assert not all(torch.equal(drawn[0].train_x, other.train_x) for other in drawn[2:])
    with pytest.raises(DataError, match="per_class must be a whole number of at least 1, got 0"):
        make_stream(name, inputs=words, per_class=0)


def test_csv_files(tmp_path: Path, words: TextInput) -> None:
    file = text_csv(tmp_path / "all.csv", 5)
    alone = make_stream(f"split:{file}", inputs=words)
    assert [len(task.train_y) for task in alone] == [12, 12]  # every fifth is for testing
    assert [len(task.test_y) for task in alone] == [3, 3]
    folder = tmp_path / "two"
    folder.mkdir()
    text_csv(folder / "train.csv", 3)
    text_csv(folder / "validation.csv", 1)
    for task in make_stream(f"split:{folder}", inputs=words):
        assert (len(task.train_y), len(task.test_y)) == (9, 3)
    (folder / "more.csv").write_text("")
    (folder / "train.csv").unlink()
    with pytest.raises(DataError, match="2 CSV files, expected train.csv and test.csv, or just"):
        make_stream(f"split:{folder}", inputs=words)


def test_one_parquet_file(tmp_path: Path, words: TextInput) -> None:
    file = text_csv(tmp_path / "all.csv", 5)
    pq.write_table(pa.table(text_rows(5)), tmp_path / "all.parquet")
    ways = (f"split:{file}", f"split:{tmp_path / 'all.parquet'}")
    plain, same = (make_stream(way, inputs=words, tasks=1)[0] for way in ways)
    assert torch.equal(same.train_x.sort(0).values, plain.train_x.sort(0).values)
    assert len(same.test_y) == len(plain.test_y)


@pytest.mark.parametrize("between", [";", "\t"])
def test_csv_files_of_spreadsheets(tmp_path: Path, words: TextInput, between: str) -> None:
    file = text_csv(tmp_path / "all.csv", 5)
    names, rows = file.read_text().split("\n", 1)
    (plain,) = make_stream(f"split:{file}", inputs=words, tasks=1)
    lines = [names.title(), *rows.splitlines()]
    file.write_text("\n".join(line.replace(",", between) for line in lines), encoding="utf-8-sig")
    (task,) = make_stream(f"split:{file}", inputs=words, tasks=1)
    assert torch.equal(task.train_x, plain.train_x)
    assert task.class_names == plain.class_names


def test_folder_in_the_folder_of_data_sets(tmp_path: Path, words: TextInput) -> None:
    text_folder(tmp_path / "mine")
    assert len(make_stream("split:mine", inputs=words, data=tmp_path)) == 2


def test_numbers_as_classes_have_the_names_of_the_metadata(
    tmp_path: Path, words: TextInput
) -> None:
    features = b'{"info": {"features": {"label": {"names": ["no", "yes"]}}}}'
    (tmp_path / "texts").mkdir()
    for split in ("train", "test"):
        table = pa.table({"sentence": ["red", "blue"], "label": [0, 1]})
        table = table.replace_schema_metadata({"huggingface": features})
        pq.write_table(table, tmp_path / "texts" / f"{split}-00000-of-00001.parquet")
    task = make_stream(f"split:{tmp_path / 'texts'}", inputs=words, tasks=1)[0]
    assert set(task.class_names) == {"no", "yes"}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("text,intent\nred,\n", "row 0: there is no class"),
        ("text,intent\nred,a\n ,b\n", "row 1: there is no text"),
        ("text,intent,domain\nred,a,\n", "row 0: there is no task"),
        ("text,intent\n", "holds no rows under a line of names of columns"),
        ("said,intent\nred,a\n", "has no column of texts, 'text' or .*, only said, intent"),
        ("text,kind\nred,a\n", "has no column of classes, 'intent' or .*, only text, kind"),
        (
            "text,intent\n" + "red,a\n" * 9 + "one,b\n" * 4,
            "4 texts of class .b., expected",
        ),
        ("text,intent\n" + "red,a\n" * 9 + "one,b\n", "1 text of class .b., expected"),
        ("text,intent\n\xff,a\n", "mine.csv, line 2: this is not UTF-8; save it as CSV UTF-8"),
    ],
)
def test_bad_tables_get_a_sentence(
    tmp_path: Path, words: TextInput, content: str, sentence: str
) -> None:
    file = tmp_path / "mine.csv"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=sentence):
        make_stream(f"split:{file}", inputs=words, tasks=1)


def test_texts_and_images_are_not_confused(tmp_path: Path, words: TextInput) -> None:
    texts = text_folder(tmp_path / "texts")
    with pytest.raises(DataError, match="holds texts, which need a tokenizer: .*--net hf:NAME"):
        make_stream(f"split:{texts}", tasks=2)
    with pytest.raises(DataError, match="holds texts, which cannot be scaled to 8 pixels"):
        make_stream(f"split:{texts}@8", inputs=words)
    photos = image_folder(tmp_path / "photos", "train", "test")
    (photos / "about.csv").write_text("file,author\n")  # no texts to learn from
    with pytest.raises(DataError, match="photos holds images, but the network takes texts"):
        make_stream(f"split:{photos}", inputs=words, tasks=1)
    with pytest.raises(DataError, match="digits are images, but the network takes texts"):
        make_stream("s-digits", inputs=words)


def test_classes_that_are_only_tested_are_refused(tmp_path: Path, words: TextInput) -> None:
    folder = text_folder(tmp_path / "texts")
    pq.write_table(
        pa.table({"text": ["red"], "intent": ["new"], "domain": ["colours"]}),
        folder / "data" / "test-00000-of-00001.parquet",
    )
    with pytest.raises(DataError, match="class 'new' of task 'colours' has texts to test with"):
        make_stream(f"split:{folder}", inputs=words)


def test_images_are_scaled_as_the_network_wants(tmp_path: Path) -> None:
    photos = image_folder(tmp_path / "photos", "train", "test")
    given = ImageInput(4, mean=(0.5, 0.25, 0.0), std=(0.5, 1.0, 2.0))
    task = make_stream(f"split:{photos}", tasks=1, inputs=given)[0]
    names = [task.class_names[label] for label in task.test_y.tolist()]
    counts = {name: iter(range(5)) for name in task.class_names}
    files = [photos / "test" / name / f"{next(counts[name]):02}.png" for name in names]
    assert task.transform is not None
    assert torch.equal(task.transform(task.test_x.mul(1 / 255)), given.batch(files))
