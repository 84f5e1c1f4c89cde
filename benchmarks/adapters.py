"""What is used today in place of one network for all tasks: an adapter, a head or a whole network
for each of them, learned with the same batches, steps and start of the head as ours."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup.data.tasks import Task
from rankup.training.class_means import nearest_mean
from rankup.training.optim import rates
from rankup.training.recipe import Recipe

_MATRICES = ["query", "key", "value", "dense"]
_CHUNK = 512
_MEANS_OF = 4096  # samples, as ours


def learn_each(
    method: str, module: nn.Module, tasks: Sequence[Task], recipe: Recipe, seed: int
) -> tuple[list[float], int]:
    """The accuracy on each task and the bytes that all tasks store: `linear` (a head), `full` (a
    network), `lora:RANK`, `continued:RANK` (a LoRA that starts from the task before's), `vera:RANK`
    and `randlora:RANK`."""
    accuracies, size, learner = [], 0, None
    for task in tasks:
        if learner is None or not method.startswith("continued"):
            learner = _learner(method, copy.deepcopy(module), task)
        head = next(m for n, m in learner.named_modules() if n.endswith(_HEADS))
        _start_head(learner, head, task)
        learned = [p for p in learner.parameters() if p.requires_grad]
        _train(learner, learned, task, recipe, seed)
        accuracies.append(_accuracy(learner, task))
        size += sum(p.numel() * p.element_size() for p in learned)
    return accuracies, size


_HEADS = ("head", "head.modules_to_save.default")


def _learner(method: str, module: Any, task: Task) -> nn.Module:
    module.head = nn.Linear(module.head.in_features, task.classes, device=task.train_x.device)
    kind, _, rank = method.partition(":")
    if kind == "full":
        return module  # type: ignore[no-any-return]
    if kind == "linear":
        module.requires_grad_(False)
        module.head.requires_grad_(True)
        return module  # type: ignore[no-any-return]
    import peft

    options: dict[str, Any] = {"target_modules": _MATRICES, "modules_to_save": ["head"]}
    r = int(rank)
    config = {
        "lora": lambda: peft.LoraConfig(r=r, lora_alpha=2 * r, **options),
        "continued": lambda: peft.LoraConfig(r=r, lora_alpha=2 * r, **options),
        "vera": lambda: peft.VeraConfig(r=r, **options),
        "randlora": lambda: peft.RandLoraConfig(r=r, **options),
    }[kind]()
    return peft.get_peft_model(module, config)


@torch.no_grad()
def _start_head(learner: nn.Module, head: nn.Module, task: Task) -> None:
    features: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    learner.eval()
    for x in torch.split(task.train_x[:_MEANS_OF], _CHUNK):
        learner(x)
    hook.remove()
    start = nearest_mean(torch.cat(features), task.train_y[:_MEANS_OF], task.classes)
    assert start is not None
    for parameter, value in zip((head.weight, head.bias), start, strict=True):
        parameter.copy_(value)  # type: ignore[operator, union-attr]


def _train(
    learner: nn.Module, learned: Sequence[nn.Parameter], task: Task, recipe: Recipe, seed: int
) -> None:
    batch = min(recipe.batch, len(task.train_y))
    per_epoch = -(-len(task.train_y) // batch)
    schedule = rates(recipe, recipe.lr, recipe.epochs * per_epoch)
    fused = task.train_x.is_cuda
    optimiser = torch.optim.AdamW(learned, weight_decay=recipe.weight_decay, fused=fused)
    generator = torch.Generator().manual_seed(seed)
    learner.train()
    for step, rate in enumerate(schedule):
        if step % per_epoch == 0:
            order = torch.randperm(len(task.train_y), generator=generator)
            order = torch.cat([order, order[: per_epoch * batch - len(order)]])
            order = order.to(task.train_x.device)
        rows = order[step % per_epoch * batch :][:batch]
        optimiser.param_groups[0]["lr"] = rate
        loss = F.cross_entropy(learner(task.train_x[rows]), task.train_y[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


@torch.no_grad()
def _accuracy(learner: nn.Module, task: Task) -> float:
    learner.eval()
    chunks = zip(torch.split(task.test_x, _CHUNK), torch.split(task.test_y, _CHUNK), strict=True)
    correct = sum(int((learner(x).argmax(1) == y).sum()) for x, y in chunks)
    return correct / len(task.test_y)
