"""Networks that share one base: it is stored once, and compared by its hash."""

from pathlib import Path

import pytest
import torch

import rankup
from helpers.zoo import assert_same_bits, inputs, logits, taught, teach


@pytest.fixture
def first(tmp_path: Path) -> rankup.IncrementalNet:
    torch.manual_seed(0)
    net = taught("mlp", base="keep")
    rankup.save(net, tmp_path / "first")
    return net


def test_base_of_another_network_is_used(first: rankup.IncrementalNet, tmp_path: Path) -> None:
    rankup.save(first, tmp_path / "second", base_from="../first")
    assert not (tmp_path / "second" / "base.safetensors").exists()
    assert rankup.verify(tmp_path / "second")
    loaded = rankup.load(tmp_path / "second")
    x = inputs("mlp")
    assert_same_bits(logits(first, x), logits(loaded, x))
    teach(loaded, "one more", x)
    rankup.save(loaded, tmp_path / "second")  # remembers where its base is
    assert not (tmp_path / "second" / "base.safetensors").exists()
    assert rankup.load(tmp_path / "second").tasks[-1] == "one more"


def test_other_or_missing_base_is_refused(first: rankup.IncrementalNet, tmp_path: Path) -> None:
    torch.manual_seed(1)
    rankup.save(taught("mlp", base="keep"), tmp_path / "other")
    with pytest.raises(rankup.StoreError, match="is not the base of this network"):
        rankup.save(first, tmp_path / "second", base_from="../other")
    with pytest.raises(rankup.StoreError, match="is not the base of this network, or cannot"):
        rankup.save(first, tmp_path / "second", base_from="../nowhere")
    with pytest.raises(rankup.StoreError, match="base_from is for networks"):
        rankup.save(taught("mlp"), tmp_path / "new", base_from="../first")
    rankup.save(first, tmp_path / "second", base_from="../first")
    base = tmp_path / "first" / "base.safetensors"
    content = bytearray(base.read_bytes())
    content[-1] ^= 1
    base.write_bytes(content)
    with pytest.raises(rankup.StoreError, match="is not the file that was saved"):
        rankup.load(tmp_path / "second")
    base.unlink()
    assert "base.safetensors is missing" in str(rankup.verify(tmp_path / "second"))


def test_base_on_the_hub(
    first: rankup.IncrementalNet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(repository: str, file: str, revision: str | None) -> str:
        asked.append((repository, file, revision))
        return str(tmp_path / "first" / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    rankup.save(first, tmp_path / "second", base_from="hf://user/base@abc")
    x = inputs("mlp")
    assert_same_bits(logits(first, x), logits(rankup.load(tmp_path / "second"), x))
    assert {*asked} == {("user/base", "base.safetensors", "abc")}
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(rankup.StoreError, match="hf://user/base@abc, cannot be had"):
        rankup.load(tmp_path / "second")
