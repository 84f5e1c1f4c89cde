"""All tasks of five networks, each in one ONNX file: within 1e-5 of torch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankup
from helpers.calling import Call
from helpers.words import VOCABULARY, tokenizer_folder
from rankup.data.inputs import ImageInput, Input, TensorInput, TextInput

ort: Any = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

Made = tuple[rankup.IncrementalNet, Input]


def mlp() -> Made:
    return rankup.grow(rankup.models.mlp(64, [32]), rankup.Rank(4, 2)), TensorInput((64,))


def seeded() -> Made:
    rank = rankup.Rank(first=2, step=1, seeded=64)
    return rankup.grow(rankup.models.mlp(64, [32, 32]), rank), TensorInput((64,))


def resnet18() -> Made:
    module = rankup.models.resnet18(8, image_size=32)
    return rankup.grow(module, rankup.Rank.proportional(0.1, 0.02)), ImageInput(32)


def vit() -> Made:
    pytest.importorskip("timm")
    module = rankup.models.timm("test_vit.r160_in1k", img_size=32)
    return rankup.grow(module, rankup.Rank(4, 1), base="keep"), ImageInput(32)


def bert() -> Made:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "vocab_size": len(VOCABULARY)}
    config = transformers.BertConfig(**sizes, max_position_embeddings=16)
    transformers.BertModel(config).save_pretrained("bert")
    tokenizer_folder(Path("bert"))
    module: nn.Module = rankup.models.hf("bert", pretrained=True)
    return rankup.grow(module, rankup.Rank(4, 1), base="keep"), rankup.models.inputs_of(module)


def learn(net: rankup.IncrementalNet, inputs: Input) -> None:
    """Four tasks of other numbers of classes, far from where they began."""
    for task, classes in enumerate((3, 5, 2, 7)):
        net.begin_task(f"task {task}", classes, selectors=0.5)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
        net.commit_task(calibrate=[samples(inputs)])


def samples(inputs: Input) -> torch.Tensor:
    if isinstance(inputs, ImageInput):
        return torch.rand(6, 3, inputs.size, inputs.size)
    if isinstance(inputs, TextInput):
        return inputs.batch([f"{word} what" for word in VOCABULARY[-6:]])
    return torch.rand(6, *inputs.shape)


@pytest.mark.parametrize("made", [mlp, seeded, resnet18, vit, bert])
def test_every_task_is_within_the_bar(
    made: Callable[[], Made], call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net, net.inputs = made()
    assert net.inputs is not None
    learn(net, net.inputs)
    rankup.save(net, "net")
    done = call("export", "net", "--all", "--json")
    assert done.code == 0, done.err
    session, x = ort.InferenceSession("net.onnx"), samples(net.inputs)
    worst = json.loads(done.out)["gap"]
    for task, name in enumerate(net.tasks):
        of_task = torch.full((len(x),), task)
        (said,) = session.run(None, {"inputs": x.numpy(), "task": of_task.numpy()})
        with torch.no_grad():
            expected = rankup.load("net", tasks=[name])(x, task=name)
        gap = (torch.from_numpy(said)[:, : expected.shape[1]] - expected).abs().max()
        worst = max(worst, float(gap / expected.abs().max()))
    print(f"{made.__name__}: {worst:.1e}")
    assert worst <= 1e-5
