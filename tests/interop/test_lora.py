"""A LoRA adapter becomes a task and a task an adapter, with the same answers from PEFT."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import helpers.published as published
import rankup

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")

CLASSES = published.CLASSES


def bert() -> nn.Module:
    return published.TRANSFORMERS["BERT"].make().eval()


def gpt2() -> nn.Module:
    return published.TRANSFORMERS["GPT-2"].make().eval()


def vit() -> nn.Module:
    return published.TIMM["vit_tiny_patch16_224"].make().eval()


def convnext() -> nn.Module:
    """With depthwise convolutions, layer scales and norms of its own."""
    return published.TIMM["convnext_tiny"].make().eval()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.wide = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.norm = nn.BatchNorm2d(8)
        self.line = nn.Conv1d(8, 8, 3)
        self.pre_fc = nn.Linear(8, 8)  # ends like the head, which PEFT saves
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.wide(self.plain(x).relu())).relu()
        return self.fc(self.pre_fc(self.line(x.flatten(2)).relu().mean(-1)).relu())


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return Convolutions().eval()


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "BERT": (bert, published.tokens),
    "GPT-2": (gpt2, published.tokens),
    "ViT": (vit, published.images(32)),
    "ConvNeXt": (convnext, published.images(32)),
    "convolutions": (convolutions, published.images(32)),
}


def inputs(name: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return MODULES[name][1](4)


def answer(module: Any, batch: dict[str, Tensor], **task: str) -> Tensor:
    with torch.no_grad():
        return published.logits(module(**batch, **task))


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def learned(name: str, rank: Any = None) -> rankup.IncrementalNet:
    """A network of two tasks, every number of which is other than at the start."""
    net = rankup.grow(MODULES[name][0](), rank or rankup.Rank(4, 2), base="keep")
    for task in ("a", "b"):
        net.begin_task(task, CLASSES, selectors=0.5)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
        net.commit_task(calibrate=[(None, inputs(name))])
    return net.eval()


@pytest.mark.parametrize("name", MODULES)
def test_task_becomes_adapter(name: str, tmp_path: Path) -> None:
    net, batch = learned(name), inputs(name)
    rankup.to_lora(net, "b", tmp_path)
    loaded = peft.PeftModel.from_pretrained(MODULES[name][0](), tmp_path).eval()
    expected = answer(net, batch, task="b")
    assert_same(answer(loaded, batch), expected)
    assert (answer(MODULES[name][0](), batch) - expected).abs().max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize(("rslora", "bias"), [(False, "none"), (True, "none"), (False, "all")])
@pytest.mark.parametrize(
    ("name", "targets", "saved"),
    [
        ("BERT", ["query", "value", "output.dense"], ["classifier"]),
        ("GPT-2", ["c_attn", "c_proj"], ["score"]),
        ("ViT", ["qkv", "fc1", "patch_embed.proj"], ["head", "norm1"]),
    ],
)
def test_adapter_becomes_task(
    name: str, targets: list[str], saved: list[str], rslora: bool, bias: str, tmp_path: Path
) -> None:
    build, batch = MODULES[name][0], inputs(name)
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=targets, modules_to_save=saved, use_rslora=rslora,
        bias=bias, lora_bias=name != "ViT", init_lora_weights=False,
        rank_pattern={targets[0]: 2}, alpha_pattern={targets[0]: 7},
    )  # fmt: skip
    adapted = peft.get_peft_model(build(), config).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    adapted.save_pretrained(tmp_path)

    net = rankup.grow(build(), rankup.Rank(4, 1), base="keep")
    net.begin_task("before", 3)
    net.commit_task()
    rankup.from_lora(net, "adapter", tmp_path)
    assert net.learning == "adapter"
    net.commit_task()
    expected = answer(adapted, batch)
    assert_same(answer(net.eval(), batch, task="adapter"), expected)
    assert (answer(build(), batch) - expected).abs().max() > 1e-2 * expected.abs().max()


def test_task_comes_back_from_its_adapter(tmp_path: Path) -> None:
    net, batch = (
        learned("BERT", {"*key": rankup.Rank(3, 1), "*": rankup.Rank(4, 2)}),
        inputs("BERT"),
    )
    rankup.to_lora(net, "b", tmp_path)
    other = rankup.grow(bert(), rankup.Rank(6, 2), base="keep")
    rankup.from_lora(other, "b", tmp_path)
    other.commit_task()
    assert_same(answer(other.eval(), batch, task="b"), answer(net, batch, task="b"))


def test_adapter_holds_only_what_task_uses(tmp_path: Path) -> None:
    """A round trip of an adapter of two layers gives these two layers, at their rank."""
    config = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False,
                             modules_to_save=["classifier"])  # fmt: skip
    peft.get_peft_model(bert(), config).save_pretrained(tmp_path / "given")
    net = rankup.grow(bert(), rankup.Rank(4, 2), base="keep")
    rankup.from_lora(net, "a", tmp_path / "given")
    net.commit_task()
    rankup.to_lora(net, 0, tmp_path / "back")
    given, back = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("given", "back"))
    assert given.keys() == back.keys()
    assert {key: t.shape for key, t in given.items()} == {key: t.shape for key, t in back.items()}


def test_head_may_be_missing(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["query"])
    peft.get_peft_model(bert(), config).save_pretrained(tmp_path)
    net = rankup.grow(bert(), rankup.Rank(4, 2), base="keep")
    with pytest.raises(rankup.RankupError, match="no head 'classifier' of its own"):
        rankup.from_lora(net, "a", tmp_path)
    assert net.learning is None
    rankup.from_lora(net, "a", tmp_path, classes=5)
    net.commit_task()
    assert net.classes == {"a": 5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 9}, "rank 9 in layer .* adds 4 factors"),
        ({"use_dora": True}, "only the pairs of plain LoRA"),
        ({"target_modules": ["word_embeddings"]}, "only the pairs of plain LoRA"),
        ({"modules_to_save": ["classifier", "pooler"]}, "per_task=.'bert.pooler.dense.weight'"),
    ],
)
def test_what_does_not_fit_is_said(options: Any, message: str, tmp_path: Path) -> None:
    given = {"r": 2, "target_modules": ["query"], "modules_to_save": ["classifier"]}
    adapted = peft.get_peft_model(bert(), peft.LoraConfig(**given | options))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(1)
    adapted.save_pretrained(tmp_path)
    net = rankup.grow(bert(), rankup.Rank(4, 2), base="keep")
    with pytest.raises(rankup.RankupError, match=message):
        rankup.from_lora(net, "a", tmp_path)
    assert net.learning is None


def test_per_task_takes_what_adapter_saves_whole(tmp_path: Path) -> None:
    saved = ["classifier", "pooler.dense"]
    config = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=saved)
    adapted, batch = peft.get_peft_model(bert(), config).eval(), inputs("BERT")
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    adapted.save_pretrained(tmp_path / "given")
    net = rankup.grow(bert(), rankup.Rank(4, 2), base="keep", per_task=["bert.pooler.dense.weight"])
    rankup.from_lora(net, "a", tmp_path / "given")
    net.commit_task()
    assert_same(answer(net.eval(), batch, task="a"), answer(adapted, batch))
    rankup.to_lora(net, "a", tmp_path / "back")
    loaded = peft.PeftModel.from_pretrained(bert(), tmp_path / "back").eval()
    assert_same(answer(loaded, batch), answer(adapted, batch))


def test_what_no_adapter_holds_is_said(tmp_path: Path) -> None:
    net = rankup.grow(vit(), rankup.Rank(4, 2), base="keep", per_task=["cls_token"])
    net.begin_task("a", 3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    net.commit_task()
    with pytest.raises(rankup.RankupError, match="cannot hold the task's own cls_token"):
        rankup.to_lora(net, "a", tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x).relu()))


def test_tied_weights_are_not_parted(tmp_path: Path) -> None:
    net = rankup.grow(Tied(), rankup.Rank(2, 1), base="keep")
    net.begin_task("a", 2)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    net.commit_task()
    with pytest.raises(rankup.RankupError, match="one.weight and two.weight are one parameter"):
        rankup.to_lora(net, "a", tmp_path)


def test_adapter_of_another_module_is_said(tmp_path: Path) -> None:
    net = rankup.grow(bert(), rankup.Rank(4, 2), base="keep")
    rankup.to_lora(learned("BERT"), "a", tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    key = "base_model.model.classifier.weight"
    save_file(tensors | {key: tensors[key][:, :-1].contiguous()}, path)
    with pytest.raises(rankup.RankupError, match="weight of 'classifier' has the shape"):
        rankup.from_lora(net, "a", tmp_path)
    assert net.learning is None
    with pytest.raises(rankup.RankupError, match="adds to layer 'bert"):
        rankup.from_lora(rankup.grow(vit(), rankup.Rank(4, 2), base="keep"), "a", tmp_path)


def test_needs_kept_weights_and_files(tmp_path: Path) -> None:
    net = rankup.grow(rankup.models.mlp(4, hidden=[4]), rankup.Rank(2, 1))
    net.begin_task("a", 2)
    net.commit_task()
    with pytest.raises(rankup.RankupError, match="base='keep'"):
        rankup.to_lora(net, "a", tmp_path)
    kept = rankup.grow(bert(), rankup.Rank(4, 2), base="keep")
    with pytest.raises(rankup.StoreError, match="not a folder of a LoRA adapter"):
        rankup.from_lora(kept, "a", tmp_path / "none")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(rankup.RankupError, match="of the kind 'IA3'"):
        rankup.from_lora(kept, "a", tmp_path)
