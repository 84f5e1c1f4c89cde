"""What is used today in place of one network for all tasks: an adapter, a head or a whole network
for each of them, learned with the same batches, steps and start of the head as ours."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rankup import seeds
from rankup.data.tasks import Task
from rankup.training.batches import Feed
from rankup.training.class_means import nearest_mean
from rankup.training.evaluate import fraction_correct
from rankup.training.optim import rates
from rankup.training.recipe import Recipe

_TEXT_MATRICES = ["query", "key", "value", "dense"]
_MEANS_OF = 4096  # samples, as ours


def learn_each(
    method: str, module: nn.Module, tasks: Sequence[Task], recipes: Sequence[Recipe], seed: int
) -> tuple[list[float], list[int]]:
    """The accuracy on each task and the bytes that each stores: `linear` (a head), `full` (a
    network), `lora:RANK`, `continued:RANK` (a LoRA that starts from the task before's), `vera:RANK`
    and `randlora:RANK`."""
    accuracies: list[float] = []
    sizes: list[int] = []
    learner = None
    for task, recipe in zip(tasks, recipes, strict=True):
        feed = Feed(task, recipe, task.train_x.device)
        if learner is None or not method.startswith("continued"):
            learner = _learner(method, copy.deepcopy(module), task)
        head = _head_of(learner, module)
        if head.out_features != task.classes:  # continued from a task of more or fewer classes
            head = head.modules_to_save["default"]  # PEFT's wrapper passes on reads alone
            head.weight = nn.Parameter(head.weight.new_empty(task.classes, head.in_features))
            head.bias = nn.Parameter(head.bias.new_empty(task.classes))
            head.out_features = task.classes
        _start_head(learner, head, feed)
        learned = [p for p in learner.parameters() if p.requires_grad]
        _train(learner, learned, feed, seed)
        learner.eval()
        with torch.no_grad():
            accuracies.append(fraction_correct(learner, feed.test()))
        sizes.append(sum(p.numel() * p.element_size() for p in learned))
    return accuracies, sizes


def _head_of(learner: nn.Module, module: nn.Module) -> Any:
    name = _head_name(module)
    ends = (name, f"{name}.modules_to_save.default")
    return next(
        m
        for n, m in learner.named_modules()
        if n in ends or n.endswith(tuple("." + e for e in ends))
    )


def _head_name(module: nn.Module) -> str:
    return getattr(module, "head_name", "head")


def _learner(method: str, module: Any, task: Task) -> nn.Module:
    name = _head_name(module)
    old = getattr(module, name)
    setattr(module, name, nn.Linear(old.in_features, task.classes, device=task.train_x.device))
    kind, _, rank = method.partition(":")
    if kind == "full":
        return module  # type: ignore[no-any-return]
    if kind == "linear":
        module.requires_grad_(False)
        getattr(module, name).requires_grad_(True)
        return module  # type: ignore[no-any-return]
    import peft

    options: dict[str, Any] = {"target_modules": matrices(module), "modules_to_save": [name]}
    r = int(rank)
    config = {
        "lora": lambda: peft.LoraConfig(r=r, lora_alpha=2 * r, **options),
        "continued": lambda: peft.LoraConfig(r=r, lora_alpha=2 * r, **options),
        "vera": lambda: peft.VeraConfig(r=r, **options),
        "randlora": lambda: peft.RandLoraConfig(r=r, **options),
    }[kind]()
    return peft.get_peft_model(module, config)


def matrices(module: nn.Module) -> list[str]:
    """The layers that get adapters: an encoder's matrices, or all convolutions over channels."""
    kinds = {n: m for n, m in module.named_modules() if isinstance(m, nn.Conv2d)}
    return [name for name, conv in kinds.items() if conv.groups == 1] or _TEXT_MATRICES


@torch.no_grad()
def _start_head(learner: nn.Module, head: nn.Module, feed: Feed) -> None:
    features: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    learner.eval()
    labels = []
    for x, y in feed.train(_MEANS_OF):
        learner(x)
        labels.append(y)
    hook.remove()
    start = nearest_mean(torch.cat(features), torch.cat(labels), feed.task.classes)
    assert start is not None
    for parameter, value in zip((head.weight, head.bias), start, strict=True):
        parameter.copy_(value)  # type: ignore[operator, union-attr]


def _train(learner: nn.Module, learned: Sequence[nn.Parameter], feed: Feed, seed: int) -> None:
    recipe, labels = feed.recipe, feed.task.train_y
    schedule = rates(recipe, recipe.lr, recipe.epochs * feed.steps_per_epoch)
    fused = labels.is_cuda
    optimiser = torch.optim.AdamW(learned, weight_decay=recipe.weight_decay, fused=fused)
    generator = seeds.generator(seed, "samples", feed.task.name)
    learner.train()
    for module in learner.modules():
        if isinstance(module, _BatchNorm):  # few examples would spoil its statistics
            module.eval()
    for step, rate in enumerate(schedule):
        if step % feed.steps_per_epoch == 0:
            drawn = feed.sample_epoch(generator)
            draws = {name: numbers.to(labels.device) for name, numbers in drawn.items()}
        draw = {name: numbers[step % feed.steps_per_epoch] for name, numbers in draws.items()}
        optimiser.param_groups[0]["lr"] = rate
        loss = F.cross_entropy(learner(feed.batch(feed.x, draw)), labels[draw["rows"]])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
