"""Models of timm and transformers by name are saved as plain data and rebuilt from it."""

import copy
import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankup
from helpers.words import VOCABULARY, tokenizer_folder
from rankup import models
from rankup.data import ImageInput, TextInput
from rankup.errors import RankupError, StoreError
from rankup.models import from_hf
from rankup.storage.manifest import Manifest
from rankup.storage.schema import check_manifest
from rankup.storage.seal import seal

pytest.importorskip("timm")
T: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 16, "num_labels": 3}
WORDS = {"vocab_size": len(VOCABULARY), "max_position_embeddings": 12, "pad_token_id": 0}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small encoder without a classifier, its weights and its tokenizer, in a folder."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    T.BertModel(T.BertConfig(**SMALL, **WORDS)).save_pretrained(folder)
    return tokenizer_folder(folder)


def saved_and_loaded(
    module: nn.Module, x: torch.Tensor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network grown from the module, saved, and loaded without a network, answers alike."""
    net = rankup.grow(module, rankup.Rank(2, 1), base="keep")
    net.begin_task("a", 3)
    net.commit_task(calibrate=[x])
    answer = net.eval()(x, "a")
    rankup.save(net, folder)

    def refused(*_: Any) -> None:
        raise AssertionError("a download was tried")

    monkeypatch.setattr(socket.socket, "connect", refused)
    loaded = rankup.load(folder)
    assert torch.equal(loaded(x, "a"), answer)
    assert models.describe(loaded.body) == models.describe(module)
    loaded.begin_task("b", 2)
    loaded.commit_task(calibrate=[x])
    rankup.save(loaded, folder)
    assert rankup.verify(folder)


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224"])
def test_timm(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = models.timm(name, img_size=32, in_chans=1)
    saved_and_loaded(module, torch.randn(2, 1, 32, 32), tmp_path / "net", monkeypatch)


def test_timm_says_what_images_it_takes() -> None:
    from timm.data import resolve_data_config

    module = models.timm("resnet18")
    theirs = resolve_data_config(model=module)
    assert models.inputs_of(module) == ImageInput(
        theirs["input_size"][1],
        3,
        theirs["crop_pct"],
        theirs["crop_mode"],
        theirs["mean"],
        theirs["std"],
        theirs["interpolation"],
    )
    grey = models.inputs_of(models.timm("resnet10t", in_chans=1, img_size=64))
    assert isinstance(grey, ImageInput)
    assert (grey.size, grey.channels, len(grey.mean)) == (64, 1, 1)


def test_text_encoder(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(encoder, folder)
    module = models.hf(folder)
    taken = models.inputs_of(module)
    assert taken == TextInput.of(folder, length=12)
    ids = taken.batch(["red two", "one"])
    theirs = T.BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    states = theirs(input_ids=ids[:, :2], attention_mask=ids[:, :2].ne(0).long()).last_hidden_state
    means = torch.stack([states[0].mean(0), states[1, 0]])
    torch.testing.assert_close(module(ids), module.head(means))  # type: ignore[operator]
    shutil.rmtree(folder)  # what was saved is enough
    saved_and_loaded(module, ids, tmp_path / "net", monkeypatch)


def test_columns_of_padding_are_not_computed(encoder: Path) -> None:
    module: Any = models.hf(encoder).eval()
    widths: list[int] = []
    module.model.register_forward_hook(
        lambda _, args, options, answer: widths.append(options["input_ids"].shape[1]),
        with_kwargs=True,
    )
    ids = models.inputs_of(module).batch(["red two", "one"])  # [2, 12]
    right_aligned = ids.flip(1)
    answers = [module(x) for x in (ids, right_aligned, torch.zeros_like(ids))]
    assert widths == [8, 12, 8]
    exported = torch.export.export(module, (ids,)).module()
    assert widths[3:] == [12]
    torch.testing.assert_close(answers[0], exported(ids))
    torch.testing.assert_close(answers[2], exported(torch.zeros_like(ids)))


def test_without_weights_only_the_architecture(encoder: Path) -> None:
    one, two = models.hf(encoder), models.hf(encoder, pretrained=False)
    assert models.describe(one) == models.describe(two)
    key = "model.encoder.layer.0.intermediate.dense.weight"
    assert not torch.equal(one.state_dict()[key], two.state_dict()[key])


@pytest.mark.parametrize("kind", ["Roberta", "GPT2", "ViT"])
def test_own_classifiers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, x = tokenizer_folder(tmp_path / "mine"), torch.tensor([[2, 3, 1, 1], [4, 5, 6, 7]])
    if kind == "Roberta":
        config = T.RobertaConfig(**SMALL, **WORDS | {"pad_token_id": 1})
        T.RobertaForSequenceClassification(config).save_pretrained(folder)
    elif kind == "GPT2":  # it has no token for padding
        config = T.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=8, eos_token_id=1)
        T.GPT2ForSequenceClassification(config).save_pretrained(folder)
    else:
        config = T.ViTConfig(**SMALL, image_size=16, patch_size=8)
        T.ViTForImageClassification(config).save_pretrained(folder)
        about = {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "resample": 3}
        (folder / "preprocessor_config.json").write_text(json.dumps(about))
        x = torch.randn(2, 3, 16, 16)
    module = models.hf(folder)
    taken = models.inputs_of(module)
    if isinstance(taken, TextInput):
        assert taken.pad == 1
        torch.testing.assert_close(module(x)[:1], module(x[:1, :2]))
    else:
        assert taken == ImageInput(16, mean=(0.5,) * 3, interpolation="bicubic")
    saved_and_loaded(module, x, tmp_path / "net", monkeypatch)


def strange(encoder: Path, **config: Any) -> dict[str, Any]:
    description = copy.deepcopy(models.describe(models.hf(encoder, pretrained=False)))
    description["options"]["config"] |= config
    return description


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"auto_map": {"AutoModel": "x--y.Z"}}, "config has an entry 'auto_map'"),
        ({"attn_implementation": "user/kernel"}, "an entry 'attn_implementation'"),
        ({"_attn_implementation": "user/kernel"}, "an entry '_attn_implementation'"),
        ({"inner": [{"backbone": "user/weights"}]}, r"config.inner\[0\] has an entry 'backbone'"),
        ({"quantization_config": {}}, "an entry 'quantization_config'"),
        ({"hidden_size": 10**12}, "config.hidden_size is 1000000000000"),
        ({"model_type": None}, "the config of a model has no model_type"),
        ({"eps": float("nan")}, "config.eps is nan"),
        ({"name": "\x1b[2J"}, "config.name is no short and printable text"),
        ({"deep": [[[[[[[[[[]]]]]]]]]]}, "too large or too deep"),
        ({"long": [0] * 20_000}, "too large or too deep"),
    ],
)
def test_configs_of_strangers_are_refused(
    encoder: Path, config: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        from_hf.check_options(strange(encoder, **config)["options"])


def test_no_description_takes_forever(encoder: Path) -> None:
    with pytest.raises(ValueError, match="more than 20,000 modules"):
        models.parameter_count(strange(encoder, num_hidden_layers=2**24))
    assert models.parameter_count(strange(encoder, vocab_size=2**24)) > 2**28  # not drawn


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("timm") / "net"
    net = rankup.grow(models.timm("resnet10t", img_size=32), rankup.Rank(1, 1), base="keep")
    rankup.save(net, folder)
    return folder


def edited(network: Path, folder: Path, model: dict[str, Any]) -> Path:
    """A copy of a network whose manifest says something else of its model."""
    shutil.copytree(network, folder)
    data = json.loads((folder / "manifest.json").read_text())
    data.pop("sha256")
    data["model"] |= model
    (folder / "manifest.json").write_text(json.dumps({**data, "sha256": seal(data)}))
    return folder


def options(name: str) -> dict[str, Any]:
    return {"name": name, "in_chans": 3, "img_size": 32}


@pytest.mark.parametrize("name", ["hf-hub:user/model", "local-dir:/tmp", "../x", 3, "a b"])
def test_only_names_of_timm_itself(network: Path, tmp_path: Path, name: Any) -> None:
    folder = edited(network, tmp_path / "net", {"options": options(name)})
    with pytest.raises(StoreError, match="a model of timm is given by a name such as"):
        rankup.load(folder)


def test_other_versions_are_named_where_models_have_moved(network: Path, tmp_path: Path) -> None:
    import timm

    both = f"it was saved with timm 0.1.2, and this is timm {timm.__version__}"
    gone = {"version": "0.1.2", "options": options("resnet10z")}
    with pytest.raises(StoreError, match=f"has no model 'resnet10z'.*; {both}$"):
        rankup.load(edited(network, tmp_path / "gone", gone))
    other = {"version": "0.1.2", "options": options("resnet14t")}
    with pytest.raises(StoreError, match=f"does not fit the network .*; {both}$"):
        rankup.load(edited(network, tmp_path / "other", other))


def test_network_of_an_older_version_goes_on(network: Path, tmp_path: Path) -> None:
    folder = edited(network, tmp_path / "net", {"version": "0.1.2"})
    for module in (None, models.timm("resnet10t", img_size=32)):
        net = rankup.load(folder, module)
        net.begin_task(f"task {len(net.tasks)}", 2)
        net.commit_task(calibrate=[torch.randn(2, 3, 32, 32)])
        rankup.save(net, folder)
    assert Manifest.read(folder).model["version"] == "0.1.2"


def test_missing_package_gets_a_sentence(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = models.timm("resnet10t", img_size=32)
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setattr(models, "version_of", lambda package: None)
    with pytest.raises(StoreError, match=r"needs the package timm: pip install 'rankup\[real\]'$"):
        rankup.load(network)
    assert rankup.load(network, module).tasks == []
    assert rankup.verify(network)  # its files can be checked all the same
    with pytest.raises(RankupError, match="timm:resnet18 needs the package timm"):
        models.timm("resnet18")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: models.timm("resnet8"), "has no model 'resnet8' .did you mean resnet18"),
        (lambda: models.timm("resnet18", in_chans=0), "in_chans must be a whole number"),
        (lambda: models.hf("/nowhere/at/all"), "hf:/nowhere/at/all cannot be made: "),
    ],
)
def test_wrong_names_get_a_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(RankupError, match=sentence) as refusal:
        make()
    assert "\n" not in str(refusal.value)


def test_package_that_does_not_load_is_told_with_the_reason() -> None:
    lazy = ModuleNotFoundError("Could not import module 'BertModel'.")
    lazy.__cause__ = RuntimeError("operator nms does not exist\nin torchvision")
    sentence = "hf:x needs a package that does not load: operator nms does not exist$"
    with pytest.raises(RankupError, match=sentence), from_hf._one_sentence("hf:x"):
        raise lazy


def test_manifest_with_a_model_by_name_is_checked(network: Path) -> None:
    data = json.loads((network / "manifest.json").read_text())
    data.pop("sha256")
    check_manifest(data, "")
    data["model"]["options"]["pretrained"] = True
    with pytest.raises(ValueError, match="unknown entry 'pretrained'"):
        check_manifest(data, "")
