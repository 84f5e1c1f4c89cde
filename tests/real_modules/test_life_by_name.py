"""Published networks on the command line of a network's life: taught texts and images, exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rankup
from helpers.calling import Call
from helpers.own_images import own_images
from helpers.words import COLOURS, VOCABULARY, text_csv, tokenizer_folder
from rankup.data.inputs import ImageInput, TextInput
from rankup.data.texts import texts_of_csv
from rankup.life.samples import find, read_task

pytest.importorskip("timm")
T: Any = pytest.importorskip("transformers")
ort: Any = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_texts_are_taught_asked_tested_and_exported(call: Call) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "vocab_size": len(VOCABULARY)}
    config = T.BertConfig(**sizes, max_position_embeddings=16)
    T.BertModel(config).save_pretrained("bert")
    tokenizer_folder(Path("bert"))
    text_csv(Path("texts.csv"), 10)
    assert call("new", "net", "--net", "hf:bert", "--pretrained").code == 0
    inputs = rankup.load("net").inputs
    assert isinstance(inputs, TextInput)
    found = find(Path("texts.csv"), inputs)
    task, _ = read_task("words", found, inputs, lambda count: None)
    assert task.train_x.shape[1] == task.test_x.shape[1] == 8 < inputs.length  # two words each
    done = call("learn", "net", "texts.csv", "--name", "words", "--lr", "0.02", "--json")
    assert done.code == 0, done.err
    assert len(json.loads(done.out)["classes"]) == 6
    assert json.loads(done.out)["accuracy"] == 1
    said = json.loads(call("predict", "net", *COLOURS, "--json").out)
    assert [max(each["classes"], key=each["classes"].get) for each in said] == [
        f"{word}_intent" for word in COLOURS
    ]
    assert "100.0% right, 60 of 60" in call("test", "net", "texts.csv").out
    said = call("predict", "net", "texts.csv", "--csv").out.splitlines()
    assert [row.split(",")[0] for row in said[1:]] == texts_of_csv(Path("texts.csv"))
    Path("texts.txt").write_text("red\n")
    refused = call("predict", "net", "texts.txt")
    assert "texts.txt is a file, but the network is asked about texts" in refused.err
    done = call("export", "net")
    assert done.code == 0, done.err
    _assert_exported(Path("words.onnx"), "net", list(COLOURS))


def test_timm_network_is_taught_images_as_it_wants_them(call: Call) -> None:
    done = call("new", "net", "--net", "timm:test_resnet.r160_in1k", "--size", "32")
    assert done.code == 0, done.err
    inputs = rankup.load("net").inputs
    assert isinstance(inputs, ImageInput)
    assert inputs.size == 32
    assert not inputs.is_plain
    images = own_images(Path("photos"), "a", "b")
    done = call("learn", "net", images, "--epochs", "4", "--json")
    assert done.code == 0, done.err
    # As the network prepares its inputs, not as the task was read for learning.
    files = sorted(images.rglob("*.png"))
    with torch.no_grad():
        said = rankup.load("net")(inputs.batch(files), task="photos").argmax(1)
    right = sum("ab"[c] == file.parent.name for c, file in zip(said, files, strict=True))
    told = json.loads(call("test", "net", images, "--json").out)
    assert sum(told["right"].values()) == right
    assert call("export", "net", "--to", "onnx").code == 0
    _assert_exported(Path("photos.onnx"), "net", files)


def _assert_exported(file: Path, net: str, items: list[Any]) -> None:
    """A file answers as the network does, for a batch of another size than it was tried with."""
    loaded = rankup.load(net)
    assert loaded.inputs is not None
    x = loaded.inputs.batch(items)
    (logits,) = ort.InferenceSession(str(file)).run(None, {"inputs": x.numpy()})
    with torch.no_grad():
        expected = loaded(x, task=file.stem)
    gap = (torch.from_numpy(logits) - expected).abs().max() / expected.abs().max()
    assert gap <= 1e-5
    about = json.loads(file.with_suffix(".json").read_text())
    assert tuple(about["class_names"]) == loaded.describe(file.stem).class_names
    assert about["inputs"] == loaded.inputs.to_json()
