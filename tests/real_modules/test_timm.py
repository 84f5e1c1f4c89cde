"""Models of timm grow on the first call and keep every promise."""

from functools import partial
from pathlib import Path

import pytest
import torch

from helpers.promises import assert_promises

timm = pytest.importorskip("timm")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# Names, and the side of the images that they take.
MODELS = {
    "resnet18": 64,
    "resnext50_32x4d": 64,
    "nf_resnet26": 64,
    "regnety_002": 64,
    "densenet121": 64,
    "mobilenetv3_small_100": 64,
    "efficientnet_b0": 64,
    "convnext_tiny": 64,
    "vit_tiny_patch16_224": 224,
    "beit_base_patch16_224": 224,
    "swin_tiny_patch4_window7_224": 224,
    "mixer_s16_224": 224,
    "mobilevit_xs": 64,
}


@pytest.mark.parametrize("name", MODELS)
def test_promises_hold(name: str, tmp_path: Path) -> None:
    side = MODELS[name]
    make = partial(timm.create_model, name, num_classes=7)
    assert_promises(make, {"x": torch.randn(4, 3, side, side)}, tmp_path / "net")
