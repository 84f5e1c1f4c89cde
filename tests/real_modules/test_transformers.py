"""Models of transformers grow on the first call and keep every promise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.promises import assert_promises

T: Any = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "num_labels": 7,
}
WORDS = {"vocab_size": 50, "max_position_embeddings": 40, "pad_token_id": 0}
PATCHES = {"image_size": 32, "patch_size": 8}
Make = Callable[[], nn.Module]


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(2, 50, (4, 9))
    ids[:, -1] = 1  # where a sequence ends
    return {"input_ids": ids}


def images(side: int = 32) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, side, side)}


def text(name: str, **more: Any) -> Make:
    kind, config = getattr(T, f"{name}ForSequenceClassification"), getattr(T, f"{name}Config")
    return lambda: kind(config(**SMALL, **WORDS, **more))


def vision(name: str, **settings: Any) -> Make:
    kind, config = getattr(T, f"{name}ForImageClassification"), getattr(T, f"{name}Config")
    return lambda: kind(config(**settings))


MODELS: dict[str, tuple[Make, Callable[[], dict[str, Tensor]]]] = {
    "BERT": (text("Bert"), tokens),
    "RoBERTa": (text("Roberta"), tokens),
    "ALBERT": (text("Albert", embedding_size=16), tokens),
    "DeBERTa v2": (
        text("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
        tokens,
    ),
    "GPT-NeoX": (text("GPTNeoX"), tokens),
    "Llama": (text("Llama"), tokens),
    "Qwen2": (text("Qwen2", num_key_value_heads=2), tokens),
    "Mixtral": (text("Mixtral", num_key_value_heads=2, num_local_experts=2), tokens),
    "GPT-2": (
        lambda: T.GPT2ForSequenceClassification(
            T.GPT2Config(
                n_embd=32, n_layer=2, n_head=4, vocab_size=50, num_labels=7, pad_token_id=0
            )
        ),
        tokens,
    ),
    "T5": (
        lambda: T.T5ForSequenceClassification(
            T.T5Config(
                d_model=32,
                d_kv=8,
                d_ff=64,
                num_layers=2,
                num_heads=4,
                num_labels=7,
                vocab_size=50,
                pad_token_id=0,
                eos_token_id=1,
                decoder_start_token_id=0,
            )
        ),
        tokens,
    ),
    "ViT": (vision("ViT", **SMALL, **PATCHES), images),
    "BEiT": (vision("Beit", use_relative_position_bias=True, **SMALL, **PATCHES), images),
    "Swin": (
        vision(
            "Swin",
            image_size=32,
            embed_dim=16,
            depths=[1, 1],
            num_heads=[2, 4],
            window_size=4,
            num_labels=7,
        ),
        images,
    ),
    "ConvNeXt": (
        vision("ConvNext", hidden_sizes=[8, 16, 32, 32], depths=[1, 1, 1, 1], num_labels=7),
        images,
    ),
    "ResNet": (
        vision(
            "ResNet",
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            layer_type="basic",
            num_labels=7,
        ),
        images,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_promises_hold(name: str, tmp_path: Path) -> None:
    make, batch = MODELS[name]
    assert_promises(make, batch(), tmp_path / "net")
