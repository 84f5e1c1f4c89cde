"""A tokenizer and texts that need no download."""

import json
from pathlib import Path

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
