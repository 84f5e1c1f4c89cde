"""Images are scaled and cut as timm does it, to rounding."""

from itertools import product

import pytest
import torch
from PIL import Image

from helpers.pictures import encoded, pictures
from rankup.data import ImageInput

pytest.importorskip("timm")
pytestmark = pytest.mark.filterwarnings("ignore")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("size", [(75, 130), (131, 83), (50, 40), (56, 56)], ids=str)
def test_images_are_those_of_timm(size: tuple[int, int]) -> None:
    from timm.data import create_transform

    image = pictures(1, *size, 3)[0]
    for mode, how, crop in product(
        ("center", "squash"), ("bicubic", "bilinear", "lanczos"), (0.875, 0.95, 1.0)
    ):
        transform = create_transform(
            (3, 56, 56), crop_pct=crop, crop_mode=mode, interpolation=how, mean=MEAN, std=STD
        )
        given = ImageInput(56, 3, crop, mode, MEAN, STD, how)  # type: ignore[arg-type]
        theirs = transform(Image.fromarray(image))
        assert torch.allclose(given.batch([encoded(image)])[0], theirs, atol=1e-5)
