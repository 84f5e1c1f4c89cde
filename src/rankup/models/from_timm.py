"""Models of timm by name, which can be rebuilt from plain data, and the images that they take."""

import re
from difflib import get_close_matches
from typing import Any

from torch import nn

from rankup.data.inputs import ImageInput
from rankup.errors import RankupError
from rankup.models.packages import first_line, imported

_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)?")  # no source such as hf-hub:, no path


def check_name(name: Any) -> None:
    """Raise unless a name has the form of timm's own; `hf-hub:USER/MODEL` does not."""
    if not isinstance(name, str) or len(name) > 200 or not _NAME.fullmatch(name):
        raise RankupError(
            f"a model of timm is given by a name such as resnet18 or resnet18.a1_in1k, got {name!r}"
        )


def make(
    name: str, in_chans: int, img_size: int | None, num_classes: int = 10, pretrained: bool = False
) -> nn.Module:
    check_name(name)
    timm = imported("timm", f"timm:{name}")
    if not timm.is_model(name):
        close = get_close_matches(name.partition(".")[0], timm.list_models(), n=3)
        hint = f" (did you mean {', '.join(close)}?)" if close else ""
        raise RankupError(f"timm {timm.__version__} has no model {name!r}{hint}")
    options = {"pretrained": pretrained, "num_classes": num_classes, "in_chans": in_chans}
    try:
        if img_size is None:
            return _module(timm.create_model(name, **options))
        try:
            return _module(timm.create_model(name, img_size=img_size, **options))
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            return _module(timm.create_model(name, **options))  # convolutions take any size
    # Downloads and models' own checks raise errors of many kinds.
    except Exception as error:
        what = "weights cannot be had" if pretrained else "it cannot be built"
        raise RankupError(
            f"timm:{name} with in_chans={in_chans} and img_size={img_size}: {what}: "
            f"{first_line(error)}"
        ) from error


def _module(made: Any) -> nn.Module:
    assert isinstance(made, nn.Module)
    return made


def trained_with(name: str) -> ImageInput:
    """The images that timm's published weights of a model were trained with."""
    check_name(name)
    found = imported("timm", f"timm:{name}").get_pretrained_cfg(name)
    return inputs_of({} if found is None else found.to_dict(), 3, None)


def inputs_of(about: dict[str, Any], in_chans: int, img_size: int | None) -> ImageInput:
    """The images that a model takes.

    Args:
        about: its configuration in timm, which has the scaling that it was trained with.
        in_chans: channels that it was made with.
        img_size: size that it was made with, if not its usual one.
    """
    _, height, width = about.get("input_size") or (3, 224, 224)
    how = about.get("interpolation")
    mean, std = (tuple(about.get(key) or default) for key, default in (("mean", [0]), ("std", [1])))
    if len(mean) != in_chans or len(std) != in_chans:
        mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
    return ImageInput(
        size=img_size or max(height, width),
        channels=1 if in_chans == 1 else 3,
        crop=about.get("crop_pct") or 0.875,
        crop_mode="squash" if about.get("crop_mode") == "squash" else "center",
        mean=mean,
        std=std,
        interpolation=how if how in ("bilinear", "bicubic", "lanczos") else "bilinear",
    )
