"""`rankup run` and `compare` with published networks, on texts and on images."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankup
from helpers.calling import Call
from helpers.own_images import own_images
from helpers.words import VOCABULARY, text_folder, tokenizer_folder
from rankup import models
from rankup.models import from_timm
from rankup.runs.launch import Launch
from rankup.runs.request import Request

pytest.importorskip("timm")
T: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT |= {"intermediate_size": 32, "vocab_size": len(VOCABULARY), "max_position_embeddings": 16}
QUICK = ("--epochs", 15, "--lr", 0.02, "--batch", 16, "--threads", 1)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with texts and a model, in which commands run."""
    monkeypatch.chdir(tmp_path)
    text_folder(Path("texts"))
    torch.manual_seed(0)
    T.BertModel(T.BertConfig(**BERT)).save_pretrained("bert")
    tokenizer_folder(Path("bert"))
    return tmp_path


def lines(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("here")
def test_texts_are_learned_domain_by_domain(call: Call) -> None:
    asked = ("run", "--stream", "split:texts", "--net", "hf:bert", "--pretrained", "--per-class", 4)
    done = call(*asked, *QUICK, "--out", "run")
    assert done.code == 0, done.err
    assert {line["task"] for line in lines("run")} == {"colours", "numbers"}
    assert lines("run")[-1]["accuracy"] == [1.0, 1.0]
    config = json.loads(Path("run/config.json").read_text())
    assert config["preprocessing"]["length"] == config["inputs"][0] == 8
    base = rankup.load("run/net").body.state_dict()  # without the folder of the model
    weights = models.hf("bert").state_dict()
    key = "model.embeddings.word_embeddings.weight"
    assert torch.equal(base[key], weights[key])
    again = call("run", "--resume", "--out", "run")
    assert (again.code, again.out) == (0, done.out), again.err
    assert "has learned from texts as 8 tokens" in call("predict", "run", "bert/x").err
    refused = call(*asked[:-1], 3, *QUICK, "--out", "run", "--resume")
    assert "run was started with per_class 4, not 3" in refused.err


@pytest.mark.usefixtures("here", "one_process")
def test_methods_begin_with_the_same_weights(call: Call) -> None:
    asked = ("--stream", "split:texts", "--net", "hf:bert", "--pretrained", *QUICK)
    done = call("compare", *asked, "--epochs", 4, "--methods", "rank,finetune", "--out", "both")
    assert done.code == 0, done.err
    wanted = models.hf("bert").state_dict()["model.embeddings.position_embeddings.weight"]
    launch = Launch(Request("split:texts", net="hf:bert", pretrained=True))
    for name in ("rank", "finetune"):
        (run,) = launch.of(name, {}, {0: None})
        body = getattr(run.method, "net", run.method).body
        kept = body.state_dict()["model.embeddings.position_embeddings.weight"]
        assert torch.equal(kept, wanted)


@pytest.mark.usefixtures("here", "one_process")
def test_several_seeds_each_have_their_order(call: Call) -> None:
    asked = ("run", "--stream", "split:texts", "--net", "hf:bert", "--seeds", 3)
    done = call(*asked, *QUICK, "--epochs", 8, "--out", "seeds")
    assert done.code == 0, done.err
    orders = {tuple(line["task"] for line in lines(f"seeds/seed-{seed}")) for seed in range(3)}
    assert len(orders) == 2


@pytest.mark.parametrize("pretrained", [False, True])
def test_predictions_equal_what_was_measured(
    pretrained: bool, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = from_timm.make

    def without_a_download(*options: Any, **named: Any) -> nn.Module:
        return made(*options[:4], **{k: v for k, v in named.items() if k != "pretrained"})

    monkeypatch.setattr(from_timm, "make", without_a_download)
    images = own_images(tmp_path / "images", "ant", "bee", "cow", "dog")
    net = {"net": "timm:resnet10t", "pretrained": pretrained, "rank": "2,1"}
    learn = partial(rankup.run, stream=f"split:{images}@32", tasks=2, epochs=3, threads=1)
    result = learn(out=tmp_path / "run", **net)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["preprocessing"] is not None) == pretrained
    line = lines(str(tmp_path / "run"))[-1]
    task = rankup.data.make_stream(f"split:{images}@32", tasks=2)[1]
    assert result.tasks[-1] == line["task"] == task.name
    files = [file for name in task.class_names for file in sorted((images / name).iterdir())[4::5]]
    done = call("predict", tmp_path / "run", *files, "--task", task.name, "--plain")
    assert done.code == 0, done.err
    said = [row.split("\t")[1] for row in done.out.splitlines()]
    right = [word == file.parent.name for word, file in zip(said, files, strict=True)]
    assert sum(right) / len(right) == pytest.approx(line["accuracy"][-1])


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("--net mlp --pretrained", "--pretrained is for --net timm:NAME or hf:NAME_OR_PATH, not"),
        ("--net timm:resnet18 --width 3", "--width is for --net mlp and resnet18, timm:resnet18"),
        ("--net timm:nothing", "has no model 'nothing'"),
        ("--net hf:nowhere/at/all/x", "hf:nowhere/at/all/x cannot be made"),
        ("--net hf:bert --stream s-digits", "digits are images, but the network takes texts"),
    ],
)
@pytest.mark.usefixtures("here")
def test_wrong_networks_get_a_sentence(asked: str, sentence: str, call: Call) -> None:
    done = call("run", "--tasks", 2, *asked.split())
    assert done.code == 1
    assert done.err.count("\n") == 1, done.err
    assert sentence in done.err
