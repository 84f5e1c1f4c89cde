"""Promises that a grown network keeps, whatever published model it was grown from."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

import rankup
from helpers.published import Batch, Published, logits
from rankup.growing.names import starred
from rankup.growing.roles import EMBEDDINGS
from rankup.layers.spec import FactoredSpec, HeadSpec, TensorSpec, WeightSpec

TASKS = {"a": 3, "b": 5}
SAMPLES = 32
STEPS = 200


@dataclass
class Outcome:
    """What growing a model and teaching it two tasks gave."""

    net: rankup.IncrementalNet
    share: float = 0.0  # of numbers in matrices that have factors and get a gradient
    ratios: dict[str, float] = field(default_factory=dict)  # of a task's last loss to its first
    mixed: float = 0.0  # largest difference from task after task, over the largest logit
    merged: float = 0.0  # likewise, of merged modules
    passes: int = 0  # runs of the module for a mixed batch of two tasks
    unread: tuple[str, ...] = ()  # parameters that the model itself does not use


def assert_promises(published: Published, folder: Path) -> None:
    """All of them, with the bars that every model must reach."""
    outcome = keep_promises(published, folder)
    assert max(outcome.ratios.values()) < 0.1, f"not learned: {outcome.ratios}"
    assert outcome.mixed < 1e-4
    assert outcome.merged < 1e-4
    assert outcome.share > 0.85
    assert keep_promises_in_double(published) < 1e-10


def keep_promises(published: Published, folder: Path) -> Outcome:
    """Grow on the first call, learn two tasks, and check every promise on the way."""
    module, batch = published.make(), published.inputs(SAMPLES)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    outcome = Outcome(_grown(module, published))
    net = outcome.net
    outcome.unread = tuple(_without_gradient(module, published.inputs(4)))
    outcome.share = share_factored(module, net, outcome.unread)
    answers: dict[str, Tensor] = {}
    for task, classes in TASKS.items():
        outcome.ratios[task] = learn(net, task, classes, batch, published.lr)
        answers[task] = answer(net, task, batch)
        if task == "a":
            check_gradients(net, published.inputs(4), outcome.unread)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} of the given module has changed"
    for task in ("a", "b", "a"):  # what is kept from one task must not answer for another
        assert torch.equal(answer(net, task, batch), answers[task]), f"{task} has changed"
    outcome.mixed, outcome.passes = compare_mixed(net, batch, answers)
    outcome.merged = compare_merged(net, batch, answers)
    rankup.save(net, folder)
    loaded = rankup.load(folder, module=published.make()).eval()
    for task in TASKS:
        assert torch.equal(answer(loaded, task, batch), answers[task]), f"{task} differs as loaded"
    return outcome


def keep_promises_in_double(published: Published) -> float:
    """How far a mixed batch is from task after task in float64, over the largest logit."""
    module, batch = published.make().double(), _in_double(published.inputs(6))
    net = _grown(module, published)
    for task, classes in TASKS.items():
        net.begin_task(task, classes)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        net.commit_task(calibrate=[(None, batch)])
    net.eval()
    answers = {task: answer(net, task, batch) for task in TASKS}
    return compare_mixed(net, batch, answers)[0]


def describe(published: Published) -> Outcome:
    """What became of a model, without teaching it anything."""
    module, batch = published.make(), published.inputs(6)
    outcome = Outcome(_grown(module, published))
    outcome.unread = tuple(_without_gradient(module, batch))
    outcome.share = share_factored(module, outcome.net, outcome.unread)
    for task, classes in TASKS.items():
        outcome.net.begin_task(task, classes)
        outcome.net.commit_task(calibrate=[(None, batch)])
    outcome.net.eval()
    answers = {task: answer(outcome.net, task, batch) for task in TASKS}
    outcome.mixed, outcome.passes = compare_mixed(outcome.net, batch, answers)
    return outcome


def _grown(module: nn.Module, published: Published) -> rankup.IncrementalNet:
    return rankup.grow(module, rankup.Rank(8, 2), base="keep", head=published.head)


def learn(net: rankup.IncrementalNet, task: str, classes: int, batch: Batch, lr: float) -> float:
    """Learn a task; the loss of the committed task over the loss at its start."""
    net.begin_task(task, classes)
    labels = torch.arange(SAMPLES) % classes
    optimiser = torch.optim.Adam(net.parameters(), lr=lr)
    net.train()
    first = 0.0
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss = F.cross_entropy(logits(net(task=task, **batch)), labels)
        loss.backward()
        first = first or loss.item()
        if loss.item() < 0.02 * first:
            break
        optimiser.step()
    net.commit_task(calibrate=[(None, batch)])
    net.eval()
    return F.cross_entropy(answer(net, task, batch), labels).item() / first


@torch.no_grad()
def answer(net: rankup.IncrementalNet, task: str, batch: Batch) -> Tensor:
    return logits(net(task=task, **batch))


def check_gradients(net: rankup.IncrementalNet, batch: Batch, unread: tuple[str, ...]) -> None:
    """Every factored or per-task parameter gets a gradient, and changes the answer."""
    net.begin_task("tried", 4)
    net.train()  # with the statistics of its batches
    for _ in range(2):  # the first step moves factors away from zero
        net.zero_grad()
        torch.manual_seed(0)
        given = logits(net(task="tried", **batch))
        (given * torch.randn(given.shape)).sum().backward()
        with torch.no_grad():
            gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
            for parameter in net.parameters():
                parameter += 0.01 * torch.randn_like(parameter)
    net.eval()
    names, tried = _names_of_parameters(net), set[str]()  # one of each in many blocks
    before = answer(net, "tried", batch)
    for name, parameter in net.named_parameters():
        if names[name] in unread:
            continue
        gradient = gradients[name]
        assert gradient is not None, f"{name} gets no gradient"
        assert bool(gradient.any()), f"{name} gets a gradient of zeros"
        if (pattern := starred(name)) in tried:
            continue
        tried.add(pattern)
        value = parameter.detach().clone()
        with torch.no_grad():
            parameter += torch.randn_like(parameter)
        assert not torch.equal(answer(net, "tried", batch), before), f"{name} changes nothing"
        with torch.no_grad():
            parameter.copy_(value)
    net.abandon_task()


def compare_mixed(
    net: rankup.IncrementalNet, batch: Batch, answers: dict[str, Tensor]
) -> tuple[float, int]:
    samples = len(next(iter(batch.values())))
    tasks = torch.arange(samples) % 2
    calls: list[None] = []
    with torch.no_grad():
        net(task=tasks, **batch)  # a kind of batch may be tried first
        hook = net.body.register_forward_hook(lambda *_: calls.append(None))
        mixed = logits(net(task=tasks, **batch))
        hook.remove()
    furthest, largest = 0.0, max(float(given.abs().max()) for given in answers.values())
    for index, (task, given) in enumerate(answers.items()):
        rows = mixed[tasks == index][:, : TASKS[task]]
        furthest = max(furthest, float((rows - given[tasks == index]).abs().max()))
        assert bool(mixed[tasks == index][:, TASKS[task] :].eq(-torch.inf).all())
    return furthest / largest, len(calls)


@torch.no_grad()
def compare_merged(net: rankup.IncrementalNet, batch: Batch, answers: dict[str, Tensor]) -> float:
    furthest = 0.0
    for task, given in answers.items():
        difference = (logits(net.merged(task)(**batch)) - given).abs().max() / given.abs().max()
        furthest = max(furthest, float(difference))
    return furthest


def share_factored(
    module: nn.Module, net: rankup.IncrementalNet, unread: tuple[str, ...] = ()
) -> float:
    """The share of numbers in matrices that have factors and get a gradient, of all parameters but
    embeddings, positions and heads."""
    counted = dict(_counted(module, net))
    factored = {
        spec.parameter if isinstance(spec, WeightSpec) else f"{spec.name}.weight"
        for spec in net.plan.layers
        if isinstance(spec, FactoredSpec)
    }
    got = sum(n for name, n in counted.items() if name in factored and name not in unread)
    return got / sum(n for name, n in counted.items() if name not in unread)


def _counted(module: nn.Module, net: rankup.IncrementalNet) -> Iterator[tuple[str, int]]:
    heads = {spec.name for spec in net.plan.layers if isinstance(spec, HeadSpec)}
    for owner, layer in module.named_modules():
        if owner in heads or isinstance(layer, EMBEDDINGS):
            continue
        keys = [key for key in layer._parameters if not any(w in key for w in ("embed", "pos"))]
        if is_parametrized(layer):
            keys += list(layer.parametrizations)  # type: ignore[arg-type]
        for key in keys:
            tensor = getattr(layer, key)
            if tensor is not None and "parametrizations" not in owner and "token" not in key:
                yield f"{owner}.{key}".lstrip("."), tensor.numel()


def _without_gradient(module: nn.Module, batch: Batch) -> Iterator[str]:
    """Names of parameters that the module itself does not use, or whose gradients are nothing but
    rounding: biases of attention's keys, or in front of a batch norm."""
    module = copy.deepcopy(module).double().train()
    torch.manual_seed(0)
    given = logits(module(**_in_double(batch)))
    (given * torch.randn(given.shape)).sum().backward()
    sizes = {
        name: 0.0 if parameter.grad is None else float(parameter.grad.abs().max())
        for name, parameter in module.named_parameters()
    }
    yield from (name for name, size in sizes.items() if size <= 1e-12 * max(sizes.values()))


def _in_double(batch: Batch) -> Batch:
    return {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}


def _names_of_parameters(net: rankup.IncrementalNet) -> dict[str, str]:
    """The names of the given module's parameters that a network's stand for."""
    names = {}
    layers: dict[int, Any] = {id(layer): layer for layer in net.layers}
    for path, layer in net.named_modules(remove_duplicate=False):
        if id(layer) not in layers:
            continue
        spec = layer.spec
        for key in layer._parameters:
            own = key.removeprefix("new_")
            if isinstance(spec, WeightSpec | TensorSpec):
                full = spec.parameter if isinstance(spec, WeightSpec) else spec.name
            else:
                full = f"{spec.name}.{'bias' if own == 'bias' else 'weight'}"
            names[f"{path}.{key}"] = full
    return names
