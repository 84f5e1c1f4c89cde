"""Recipes: the numbers of a training run, each with its help text. No torch here: the command line
shows them before anything heavy is loaded."""

import math
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin

from rankup.errors import RankupError


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def check_type(name: str, kind: Any, value: Any) -> None:
    """Refuse a value that is not of a field's type; True and False are not numbers."""
    is_bool = isinstance(value, bool)
    if kind is int and (is_bool or not isinstance(value, Integral)):
        raise RankupError(f"{name} must be a whole number, got {value!r}")
    if kind is float and (is_bool or not isinstance(value, Real) or not math.isfinite(value)):
        raise RankupError(f"{name} must be a finite number, got {value!r}")
    if kind is bool and not is_bool:
        raise RankupError(f"{name} must be True or False, got {value!r}")
    if get_origin(kind) is Literal and value not in get_args(kind):
        raise RankupError(
            f"{name} must be one of {', '.join(map(str, get_args(kind)))}, got {value!r}"
        )


_LARGEST = 3.4e38  # in float32


@dataclass(frozen=True)
class Recipe:
    """How a task is learned.

    >>> Recipe(epochs=5).lr
    0.01
    >>> Recipe(epochs=0)
    Traceback (most recent call last):
    rankup.errors.RankupError: epochs must be at least 1, got 0
    """

    epochs: int = _option(10, "Passes over a task's training data.")
    batch: int = _option(128, "Samples per step.")
    optimiser: Literal["adam", "sgd"] = _option(
        "adam", "Adam, or plain gradient descent without momentum."
    )
    lr: float = _option(1e-2, "Learning rate; with a one-cycle schedule its peak.")
    first_lr: float = _option(0.0, "Learning rate of the first task, if different; 0: lr.")
    schedule: Literal["one-cycle", "constant"] = _option(
        "one-cycle", "The rate over a task: up and down along a cosine, or constant."
    )
    warmup: float = _option(0.1, "Share of a one-cycle schedule during which the rate rises.")
    weight_decay: float = _option(0.0, "Decoupled weight decay on everything a task learns.")
    loss: Literal["cross-entropy", "mse"] = _option(
        "cross-entropy", "Cross-entropy, or the squared error of the softmax, as in the paper."
    )
    softness: float = _option(
        1.0, "With a teacher: how much its answers and ours are softened before comparing them."
    )
    pixels: Literal["unit", "centred", "raw"] = _option(
        "unit", "Pixel values from 0 to 1, from -1 to 1, or from 0 to 255."
    )
    selectors: str | float = _option(
        "previous",
        "Where selectors over old factors start: the 'previous' task's values, the same 'halfway', "
        "with those over that task's own factors halved, or a number.",
    )
    norms: Literal["fresh", "previous"] = _option(
        "previous", "Where norms' weights start: fresh or at the previous task's."
    )
    head: Literal["drawn", "means"] = _option(
        "drawn",
        "Where a head starts: drawn at random, or at the means of its classes' features, which a "
        "pretrained network tells apart already.",
    )
    factors: float = _option(1.0, "Length of a new factor's vectors at the start.")
    first_factors: float = _option(
        0.0,
        "The same for the first task, if different: long ones stay useful to later tasks. 0: as "
        "for the others.",
    )
    flip: bool = _option(False, "Mirror half of the training images.")
    precision: Literal["float32", "tf32", "bfloat16"] = _option(
        "float32", "Precision of matrix products in training: lower is faster on a GPU."
    )
    crop: int = _option(0, "Shift training images by up to this many pixels (reflected borders).")
    rotations: bool = _option(
        False,
        "Learn square images in four turns, a turned class as one of its own, which makes better "
        "features and takes four times the steps.",
    )
    views: int = _option(
        1,
        "With rotations: how many turned views of an image are asked and averaged, 1 or 4; four "
        "also store four times the head.",
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            check_type(item.name, item.type, getattr(self, item.name))
        for name, least in (("epochs", 1), ("batch", 1), ("crop", 0)):
            if getattr(self, name) < least:
                raise RankupError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("lr", "factors", "softness"):
            if not getattr(self, name) > 0:
                raise RankupError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("first_lr", "first_factors", "weight_decay"):
            if getattr(self, name) < 0:
                raise RankupError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.views not in (1, 4):
            raise RankupError(f"views must be 1 or 4, got {self.views}")
        if self.views > 1 and not self.rotations:
            raise RankupError("views=4 needs rotations: else nothing is learned of turned images")
        if not 0 <= self.warmup < 1:
            raise RankupError(f"warmup must be at least 0 and below 1, got {self.warmup}")
        self.selector_start()

    def selector_start(self) -> float | Literal["previous", "halfway"]:
        if self.selectors == "previous" or self.selectors == "halfway":
            return self.selectors  # type: ignore[return-value]
        try:
            start = math.nan if isinstance(self.selectors, bool) else float(self.selectors)
        except (TypeError, ValueError):
            start = math.nan
        if not abs(start) < _LARGEST:
            raise RankupError(
                f"selectors must be 'previous', 'halfway' or a number, got {self.selectors!r}"
            )
        return start

    @property
    def augments(self) -> bool:
        return self.flip or self.crop > 0


_FIELDS = "".join(f"        {f.name}: {f.metadata['help']}\n" for f in fields(Recipe))
Recipe.__doc__ = f"{Recipe.__doc__}\n    Args:\n{_FIELDS}    "

PAPER = Recipe(
    epochs=500,
    lr=1e-4,
    first_lr=1e-5,
    schedule="constant",
    loss="mse",
    pixels="raw",
    selectors="0",
    norms="fresh",
)

RECIPES = {
    "default": "ours: the paper's accuracy in a hundredth of its epochs; adapts to the stream",
    "paper": "what the paper and its notebook do: 500 epochs, squared error, constant rate",
}


_FEW_STEPS = 60  # of few samples as many steps, however many epochs they take


def _kept(samples: int) -> dict[str, Any]:
    """What differs for a pretrained network, which has little left to learn and much to lose."""
    batch = 32
    epochs = math.ceil(_FEW_STEPS * batch / max(1, samples))
    return {
        "epochs": min(max(8, epochs), _FEW_STEPS),
        "batch": batch,
        "lr": 3e-3,
        "weight_decay": 0.01,
        "selectors": "0",
        "norms": "fresh",
        "head": "means",
        "factors": 1.0,
    }


def recipe_for(
    name: str,
    *,
    colour: bool = False,
    size: int = 28,
    samples: int = 60_000,
    net: str = "mlp",
    learns_factors: bool = True,
    kept: bool = False,
    device: str = "cpu",
) -> Recipe:
    """The recipe of that name for a stream and a network.

    Args:
        colour: whether the stream is of natural images, which want augmentation.
        size: the images' shorter side, to which crops are proportional.
        samples: how many training samples a task has; with few, it takes more epochs.
        net: the network's name.
        learns_factors: whether tasks learn factors or only select from seeded ones, which takes
            a higher rate and some decay.
        kept: whether the network keeps a pretrained module's weights.
        device: where it will run; a GPU multiplies less precise numbers faster.
    """
    if name == "paper":
        return PAPER
    if name != "default":
        raise RankupError(f"there is no recipe {name!r}, only {', '.join(RECIPES)}")
    recipe = Recipe()
    if not learns_factors:
        recipe = replace(recipe, lr=2e-2, weight_decay=0.02)
    elif net == "mlp":
        recipe = replace(recipe, factors=2.0)
    if kept:
        recipe = replace(recipe, **_kept(samples))
    elif samples < 10_000:
        recipe = replace(recipe, epochs=30 if colour else 60, batch=64)
    if colour:
        decay = 0.1 if not learns_factors else 0.02 if net == "resnet18" else 0.05
        crop = min(max(1, round(size / 10.5)), size - 1)
        recipe = replace(recipe, weight_decay=decay, flip=True, crop=crop)
    if device == "cuda" and net == "resnet18":
        recipe = replace(recipe, precision="bfloat16")
    elif device == "cuda":
        recipe = replace(recipe, precision="tf32")
    return recipe
