"""A tokenizer and texts that need no download."""

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

VOCABULARY = ("[PAD]", "[UNK]", "red", "green", "blue", "one", "two", "three")


def tokenizer_folder(folder: Path) -> Path:
    """A folder with a tokenizer.json of whole words, whose ids are places in `VOCABULARY`."""
    folder.mkdir(parents=True, exist_ok=True)
    model = {
        "type": "WordLevel",
        "vocab": {word: number for number, word in enumerate(VOCABULARY)},
        "unk_token": "[UNK]",
    }
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


COLOURS, NUMBERS = VOCABULARY[2:5], VOCABULARY[5:8]


def text_rows(times: int) -> dict[str, list[str]]:
    """Texts of two domains, colours and numbers, each with three intents, and some of neither."""
    rows = [
        (f"{word} {word}", f"{word}_intent", domain)
        for domain, words in (("numbers", NUMBERS), ("colours", COLOURS))
        for word in words
        for _ in range(times)
    ]
    rows += [("what?", "oos", "out of scope")] * times
    return dict(zip(("text", "intent", "domain"), map(list, zip(*rows, strict=True)), strict=True))


def text_folder(root: Path, *, train: int = 6, test: int = 2, without: str = "") -> Path:
    """Texts in the Hub's layout; `without` a column, if one is named."""
    (root / "data").mkdir(parents=True)
    for split, times in (("train", train), ("test", test)):
        columns = {name: col for name, col in text_rows(times).items() if name != without}
        pq.write_table(pa.table(columns), root / "data" / f"{split}-00000-of-00001.parquet")
    return root


def text_csv(file: Path, times: int) -> Path:
    columns = text_rows(times)
    with open(file, "w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return file
