"""Published models of timm and transformers, small or cut in depth, with random weights.

timm imports torchvision, whose operators the CPU build of torch does not have: they are defined
here first, as nothing of them is used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_torchvision = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _torchvision.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

CLASSES = 7  # that a model is made with; tasks have others

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Published:
    """How a model is made, and inputs for a number of samples."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Batch]
    head: tuple[str, ...] | None = None  # where the model's own word leaves a choice
    lr: float = 1e-2

    def make(self) -> nn.Module:
        """A model in which no parameter is all zeros, as some are before training: it would keep
        gradients from others."""
        torch.manual_seed(0)
        module = self.build()
        with torch.no_grad():
            for parameter in module.parameters():
                if not parameter.any():
                    parameter.normal_(0, 0.1)
        return module


def logits(answer: Any) -> Tensor:
    """Of a distilled model in training, what its heads give on average, as in evaluation."""
    answer = getattr(answer, "logits", answer)
    return torch.stack(answer).mean(0) if isinstance(answer, tuple) else answer


def images(side: int, key: str = "x") -> Callable[[int], Batch]:
    return lambda samples: {key: torch.randn(samples, 3, side, side)}


def timm_model(name: str, side: int = 32, lr: float = 1e-2, **cut: Any) -> Published:
    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=CLASSES, **cut)
        return model

    return Published(make, images(side), lr=lr)


_SHALLOW = {"layers": (1, 1, 1, 1)}
_VIT = {"img_size": 32, "depth": 2}

TIMM: dict[str, Published] = {
    "resnet18": timm_model("resnet18"),
    "resnet50": timm_model("resnet50", **_SHALLOW),
    "resnext50_32x4d": timm_model("resnext50_32x4d", **_SHALLOW),
    "resnetv2_50": timm_model("resnetv2_50", **_SHALLOW),
    "nf_resnet26": timm_model("nf_resnet26"),
    "regnetx_002": timm_model("regnetx_002"),
    "regnety_002": timm_model("regnety_002"),
    "densenet121": timm_model("densenet121", block_config=(2, 2, 2, 2)),
    "vgg11_bn": timm_model("vgg11_bn", mlp_ratio=0.0625),
    "inception_v3": timm_model("inception_v3", side=75),
    "mobilenetv2_100": timm_model("mobilenetv2_100"),
    "mobilenetv3_small_100": timm_model("mobilenetv3_small_100"),
    "mobilenetv4_conv_small": timm_model("mobilenetv4_conv_small"),
    "efficientnet_b0": timm_model("efficientnet_b0"),
    "convnext_tiny": timm_model("convnext_tiny", depths=(1, 1, 1, 1)),
    "convnextv2_tiny": timm_model("convnextv2_tiny", lr=2e-3, depths=(1, 1, 1, 1)),
    "vit_tiny_patch16_224": timm_model("vit_tiny_patch16_224", **_VIT),
    "vit_small_patch16_224": timm_model("vit_small_patch16_224", **_VIT),
    "deit_tiny_patch16_224": timm_model("deit_tiny_patch16_224", **_VIT),
    "deit_tiny_distilled_patch16_224": timm_model("deit_tiny_distilled_patch16_224", **_VIT),
    "deit3_small_patch16_224": timm_model("deit3_small_patch16_224", **_VIT),
    "vit_small_patch14_dinov2": timm_model(
        "vit_small_patch14_dinov2", side=56, img_size=56, depth=2
    ),
    "eva02_tiny_patch14_224": timm_model("eva02_tiny_patch14_224", side=56, img_size=56, depth=2),
    "beit_base_patch16_224": timm_model("beit_base_patch16_224", **_VIT),
    "swin_tiny_patch4_window7_224": timm_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, depths=(2, 2)
    ),
    "swinv2_tiny_window8_256": timm_model(
        "swinv2_tiny_window8_256", img_size=32, window_size=4, depths=(2, 2)
    ),
    "maxvit_tiny_tf_224": timm_model(
        "maxvit_tiny_tf_224", img_size=64, depths=(1, 1), embed_dim=(32, 64)
    ),
    "coatnet_0_224": timm_model("coatnet_0_224", side=64, img_size=64, depths=(1, 1, 1, 1)),
    "mixer_s16_224": timm_model("mixer_s16_224", img_size=32),
    "levit_128s": timm_model("levit_128s", side=64, img_size=64, depth=(1, 1, 1)),
    "mobilevit_xs": timm_model("mobilevit_xs"),
    "efficientformer_l1": timm_model("efficientformer_l1", side=224, depths=(1, 1, 1, 2)),
}

SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "num_labels": CLASSES,
}
_WORDS = {"vocab_size": 50, "max_position_embeddings": 40, "pad_token_id": 0}
_PATCHES = {"image_size": 32, "patch_size": 8}


def tokens(samples: int) -> Batch:
    ids = torch.randint(2, 50, (samples, 9))
    ids[:, -1] = 1  # where a sequence ends
    return {"input_ids": ids}


def _pixels(side: int = 32) -> Callable[[int], Batch]:
    return images(side, "pixel_values")


def transformers_model(
    kind: str,
    config: str,
    inputs: Callable[[int], Batch],
    head: tuple[str, ...] | None = None,
    **settings: Any,
) -> Published:
    def make() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**settings)
        model: nn.Module = getattr(transformers, kind)(made)
        return model

    return Published(make, inputs, head)


def _text(name: str, **more: Any) -> Published:
    kind, config = f"{name}ForSequenceClassification", f"{name}Config"
    return transformers_model(kind, config, tokens, **SMALL | _WORDS | more)


def _vision(name: str, side: int = 32, **settings: Any) -> Published:
    kind, config = f"{name}ForImageClassification", f"{name}Config"
    return transformers_model(kind, config, _pixels(side), **{"num_labels": CLASSES, **settings})


class MambaClassifier(nn.Module):
    """transformers has no Mamba that classifies: the last state is read by a head."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        config = transformers.MambaConfig(
            vocab_size=50, hidden_size=128, num_hidden_layers=2, state_size=8, pad_token_id=0
        )
        self.body = transformers.MambaModel(config)
        self.score = nn.Linear(128, CLASSES)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.score(self.body(input_ids, use_cache=False).last_hidden_state[:, -1])


TRANSFORMERS: dict[str, Published] = {
    "BERT": _text("Bert"),
    "DistilBERT": transformers_model(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        tokens,
        dim=128,
        n_layers=2,
        n_heads=4,
        hidden_dim=256,
        vocab_size=50,
        max_position_embeddings=40,
        num_labels=CLASSES,
    ),
    "RoBERTa": _text("Roberta"),
    "ALBERT": _text("Albert", embedding_size=16),
    "DeBERTa v2": _text("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "GPT-2": transformers_model(
        "GPT2ForSequenceClassification",
        "GPT2Config",
        tokens,
        n_positions=40,
        n_embd=128,
        n_layer=2,
        n_head=4,
        vocab_size=50,
        num_labels=CLASSES,
        pad_token_id=0,
    ),
    "GPT-NeoX": _text("GPTNeoX"),
    "Llama": _text("Llama"),
    "Qwen2": _text("Qwen2", num_key_value_heads=2),
    "Mixtral": _text(
        "Mixtral",
        num_key_value_heads=2,
        num_local_experts=2,
        experts_implementation="eager",  # the other one is not for float64
    ),
    "Mamba": Published(MambaClassifier, tokens),
    "T5": transformers_model(
        "T5ForSequenceClassification",
        "T5Config",
        tokens,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        num_labels=CLASSES,
        vocab_size=50,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    ),
    "ViT": _vision("ViT", **SMALL, **_PATCHES),
    "DeiT": _vision("DeiT", **SMALL, **_PATCHES),
    "DeiT distilled": transformers_model(
        "DeiTForImageClassificationWithTeacher",
        "DeiTConfig",
        _pixels(),
        head=("cls_classifier", "distillation_classifier"),
        **SMALL,
        **_PATCHES,
    ),
    "BEiT": _vision("Beit", use_relative_position_bias=True, **SMALL, **_PATCHES),
    "DINOv2": _vision("Dinov2", **SMALL, **_PATCHES),
    "Swin": _vision(
        "Swin", image_size=32, embed_dim=64, depths=[1, 1], num_heads=[2, 4], window_size=4
    ),
    "ConvNeXt": _vision("ConvNext", hidden_sizes=[32, 64, 64, 128], depths=[1, 1, 1, 1]),
    "ResNet": _vision(
        "ResNet", embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic"
    ),
    "CLIP vision": transformers_model(
        "CLIPForImageClassification",
        "CLIPConfig",
        _pixels(),
        vision_config={**SMALL, **_PATCHES},
        text_config={**SMALL, "vocab_size": 50},
        num_labels=CLASSES,
    ),
    "MobileViT": _vision(
        "MobileViT",
        image_size=32,
        hidden_sizes=[48, 64, 80],
        neck_hidden_sizes=[16, 16, 24, 48, 64, 80, 128],
        num_attention_heads=4,
    ),
    "wav2vec2": transformers_model(
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        lambda samples: {"input_values": torch.randn(samples, 400)},
        **SMALL,
        conv_dim=(32, 32),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=16,
        mask_time_prob=0.0,
    ),
    "Whisper encoder": transformers_model(
        "WhisperForAudioClassification",
        "WhisperConfig",
        lambda samples: {"input_features": torch.randn(samples, 8, 40)},
        d_model=128,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        vocab_size=60,
        num_mel_bins=8,
        max_source_positions=20,
        classifier_proj_size=16,
        num_labels=CLASSES,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
}
