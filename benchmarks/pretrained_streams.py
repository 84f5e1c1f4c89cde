"""Streams of few examples, and the pretrained networks that learn them: texts by an encoder of
transformers, small photographs by MobileNetV2."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankup
from rankup.data.streams import Stream, make_stream
from rankup.data.tasks import Task

TEXTS = {"clinc150": None, "banking77": 7}  # how many tasks; None: those that the data names
IMAGES = ("s-cifar100", "photos")  # CIFAR-100's twenty tasks; its superclasses, and clothing
STREAMS = (*TEXTS, *IMAGES)
HELD_OUT = 20  # examples of each class
_SIDE = 64  # pixels that MobileNetV2 sees

# CIFAR-100's superclasses, as its authors list them.
_SUPERCLASSES = """
beaver dolphin otter seal whale | aquarium_fish flatfish ray shark trout
orchid poppy rose sunflower tulip | bottle bowl can cup plate
apple mushroom orange pear sweet_pepper | clock keyboard lamp telephone television
bed chair couch table wardrobe | bee beetle butterfly caterpillar cockroach
bear leopard lion tiger wolf | bridge castle house road skyscraper
cloud forest mountain plain sea | camel cattle chimpanzee elephant kangaroo
fox porcupine possum raccoon skunk | crab lobster snail spider worm
baby boy girl man woman | crocodile dinosaur lizard snake turtle
hamster mouse rabbit shrew squirrel | maple_tree oak_tree palm_tree pine_tree willow_tree
bicycle bus motorcycle pickup_truck train | lawn_mower rocket streetcar tank tractor
"""


def module_of(stream: str, weights: Path) -> nn.Module:
    """The pretrained network of a stream: a folder of transformers, or MobileNetV2's file."""
    return MobileNetV2(weights) if stream in IMAGES else rankup.models.hf(weights)


class MobileNetV2(nn.Module):
    """MobileNetV2 with weights in torchvision's layout and a head of its own. Takes pixels from 0
    to 1 of any size."""

    head_name = "outputs"  # its body has a conv_head, which PEFT would take for a head

    def __init__(self, weights: Path) -> None:
        super().__init__()
        module = rankup.models.timm("mobilenetv2_100")
        names = [name for name in module.state_dict() if not name.startswith("classifier")]
        given = torch.load(weights, weights_only=True)  # in the same order
        module.load_state_dict(dict(zip(names, given.values(), strict=True)), strict=False)
        self.outputs = module.classifier
        module.classifier = nn.Identity()
        self.body = module
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406])[:, None, None])
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225])[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, size=(_SIDE, _SIDE), mode="bilinear")
        features: Tensor = self.outputs(self.body((x - self.mean) / self.std))
        return features


def tasks_of(
    stream: str,
    data: Path,
    module: nn.Module,
    *,
    shots: int,
    seed: int,
    held_out: bool,
    rich: int = 0,
) -> list[Task]:
    """The stream's tasks in the seed's order, with so many examples of each class, 0 for all, as
    the first `rich` ones have. With `held_out` they are tested on other training data."""
    generator = torch.Generator().manual_seed(seed)
    tasks = _stream(stream, data, module, seed)
    return [
        _few(task, shots if index >= rich else 0, held_out, generator)
        for index, task in enumerate(tasks)
    ]


def _stream(stream: str, data: Path, module: nn.Module, seed: int) -> Sequence[Task] | Stream:
    if stream in TEXTS:
        inputs = rankup.models.inputs_of(module)
        return make_stream(f"split:{data / stream}", tasks=TEXTS[stream], seed=seed, inputs=inputs)
    if stream == "s-cifar100":
        return make_stream(stream, seed=seed, data=data)
    return _photos(data, seed)


def _photos(data: Path, seed: int) -> list[Task]:
    """Clothing beside CIFAR-100's superclasses, in the seed's order."""
    (cifar,) = make_stream(f"split:{data / 'cifar100'}", tasks=1)
    (clothing,) = make_stream(f"split:{data / 'clothing'}@32", tasks=1)
    tasks = [replace(clothing, name="clothing")]
    for line in _SUPERCLASSES.replace("|", "\n").split("\n"):
        if names := line.split():
            tasks.append(_of_classes(cifar, names))
    order = torch.randperm(len(tasks), generator=torch.Generator().manual_seed(seed))
    return [tasks[index] for index in order.tolist()]


def _of_classes(whole: Task, names: Sequence[str]) -> Task:
    """The part of a task that is of these classes."""
    assert whole.class_names is not None
    labels = torch.full((whole.classes,), -1)
    for number, name in enumerate(names):
        labels[whole.class_names.index(name)] = number
    rows = [(labels[y] >= 0).nonzero().flatten() for y in (whole.train_y, whole.test_y)]
    return replace(
        whole,
        name=" ".join(names),
        classes=len(names),
        class_names=tuple(names),
        train_x=whole.train_x[rows[0]],
        train_y=labels[whole.train_y[rows[0]]],
        test_x=whole.test_x[rows[1]],
        test_y=labels[whole.test_y[rows[1]]],
    )


def _few(task: Task, shots: int, held_out: bool, generator: torch.Generator) -> Task:
    learned: list[int] = []
    held: list[int] = []
    for label in range(task.classes):
        rows = (task.train_y == label).nonzero().flatten()
        rows = rows[torch.randperm(len(rows), generator=generator)].tolist()
        most = shots or len(rows) - HELD_OUT * held_out
        learned += rows[:most]
        held += rows[most : most + HELD_OUT]
    few = replace(task, train_x=task.train_x[learned], train_y=task.train_y[learned])
    if held_out:
        few = replace(few, test_x=task.train_x[held], test_y=task.train_y[held])
    return few
