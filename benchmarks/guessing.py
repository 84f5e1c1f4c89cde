"""What guessing tasks costs, how right each mixture of routers is, and how well images of no known
task are noticed, on S-CIFAR100 with ResNet18.

    PYTHONPATH=src python3 benchmarks/guessing.py DATA --seed 7001 --epochs 20

Learns once with all routers, then tries mixtures of them on held-out training data: settings are
chosen by this, on seeds and class orders that no reported run uses. `--test` reports test data.

    … DATA --rotations --views 4 --weight-decay 0.01 --seconds 400

Learns from images in four turns. With four views it also reports the same network with one: what
`views=1` would have committed, with routers scaled by its own answers. It begins no task that would
not end within `--seconds`, and reports those that it has learned. To try the script on a CPU:
`--limit 40 --tasks 3 --epochs 2 --width 6 --features 64 --rank 4,1 --seeded 1x`.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from sklearn.metrics import roc_auc_score
from torch import Tensor

import rankup
from rankup.data import make_stream, to_float
from rankup.data.heldout import hold_out
from rankup.growing.routing import RouterRule
from rankup.layers import TaskHead
from rankup.net.guess import routing_of
from rankup.net.routers.base import RoutedBatch
from rankup.net.stages import append
from rankup.training.router_examples import divided

NAMES = ("energy", "mahalanobis", "analytic")


def grown(given: argparse.Namespace) -> rankup.IncrementalNet:
    first, step = given.rank.split(",")
    return rankup.grow(
        rankup.models.resnet18(width=given.width),
        rankup.Rank(int(first), int(step), seeded=given.seeded),
        seed=given.seed,
        store="int8",
        router=f"{given.router},features={given.features}{',patches' * given.patches}",
    ).to(given.device)


def recipe_of(given: argparse.Namespace) -> rankup.Recipe:
    return rankup.Recipe(
        epochs=given.epochs,
        batch=given.batch or (128 if given.rotations else 64),
        lr=1e-2,
        weight_decay=given.weight_decay,
        flip=True,
        crop=3,
        precision="bfloat16" if given.device == "cuda" else "float32",
        selectors="previous",
        norms="previous",
        rotations=given.rotations,
        views=given.views,
    )


def learn(stream: rankup.data.Stream, given: argparse.Namespace) -> rankup.IncrementalNet:
    net, started, longest = grown(given), time.perf_counter(), 0.0
    for task in stream:
        before = time.perf_counter() - started
        if given.seconds is not None and net.tasks and before + longest > given.seconds:
            print(f"stopped after {len(net.tasks)} tasks: there is no time for one more")
            break
        try:
            rankup.fit(net, task.to(given.device), recipe_of(given))
        except rankup.TaskFailed as failure:
            print(f"stopped after {len(net.tasks)} tasks: {failure}")
            break
        took = time.perf_counter() - started
        longest = max(longest, took - before)
        print(f"{task.name}: {took:.0f} s", flush=True)
    return net.eval()


def with_one_view(
    net: rankup.IncrementalNet, stream: rankup.data.Stream, given: argparse.Namespace
) -> rankup.IncrementalNet:
    """The network as it would be if its tasks had been committed with one view."""
    other = grown(given).eval()
    for index, task in enumerate(stream):
        known = replace(net._tasks.tasks[index], views=1)
        added = [part.added(index) for part in net.parts]
        for part, tensors in zip(net.parts, added, strict=True):
            if isinstance(part, TaskHead):
                tensors.update({key: t[: known.rows] for key, t in tensors.items()})
        append(other, [known], [[tensors] for tensors in added])
        _, examples = divided(task.to(given.device), recipe_of(given), other)
        with torch.no_grad():
            other.routing = other.routing.learned(other, examples)
    return other


@torch.no_grad()
def seen(net: rankup.IncrementalNet, x: Tensor) -> dict[str, Tensor]:
    """Each router's votes, `[B, T]`, and the logits of all tasks and what the analytic router says
    of their classes, `[B, T, C]`."""
    batch = RoutedBatch(net, routing_of(net, x), x, {})
    routing = batch.routing
    found = {name: routing.routers[name].votes(batch, routing.fits(batch, name)) for name in NAMES}
    tasks = range(len(net.tasks))
    found["logits"] = torch.stack([batch.of(task).logits.float() for task in tasks], 1)
    votes = [routing.routers["analytic"].class_votes(batch, task) for task in tasks]
    found["classes"] = torch.stack([each for each in votes if each is not None], 1)
    return found


def mixtures(
    found: dict[str, Tensor], task: Tensor, label: Tensor, rule: RouterRule, search: bool
) -> None:
    """How right the rule is, and with `search` which mixtures are best."""
    logits = found["logits"]
    wanted = task * logits.shape[2] + label

    def joined(weights: dict[str, float], likeliest: int | None = None) -> tuple[Tensor, Tensor]:
        votes = sum((weight * found[name] for name, weight in weights.items()), torch.zeros(()))
        if likeliest is not None:
            kept = found["analytic"].topk(likeliest, 1).indices
            votes = torch.full_like(votes, -torch.inf).scatter_(1, kept, votes.gather(1, kept))
        own = logits.log_softmax(2) + weights.get("analytic", 0) * found["classes"]
        return votes, own.log_softmax(2) + votes.log_softmax(1)[:, :, None]

    def say(name: str, votes: Tensor, classes: Tensor) -> tuple[float, str]:
        right = (classes.flatten(1).argmax(1) == wanted).float().mean().item()
        guessed = (votes.argmax(1) == task).float().mean().item()
        return right, f"untold {right:.4f} task {guessed:.4f} {name}"

    own = logits.log_softmax(2)
    told = own[torch.arange(len(task)), task].argmax(1) == label
    print(f"told {told.float().mean():.4f}")
    weights = dict(rule.weights)
    print(say(f"the rule {rule}", *joined(weights))[1])
    for most in (2, 4, 6, 8, 12):
        if most < logits.shape[1]:
            print(say(f"the rule, likeliest={most}", *joined(weights, most))[1])
    votes, _ = joined(weights)
    print(say("the rule, classes by the network alone", votes,
              own + votes.log_softmax(1)[:, :, None])[1])  # fmt: skip
    lines = [say("largest logit", logits.amax(2), logits)]
    lines += [say(name, *joined({name: 1})) for name in NAMES]
    grids = ((0, 0.15, 0.25, 0.5, 1), (0, 0.1), (0.15, 0.25, 0.5, 0.75, 1, 1.5))
    for each in itertools.product(*grids) if search else ():
        mixed = dict(zip(NAMES, each, strict=True))
        name = ",".join(f"{name}={weight}" for name, weight in mixed.items() if weight)
        lines.append(say(name, *joined(mixed)))
    for number, (_, line) in enumerate(sorted(lines, reverse=True)):
        if number < 12 or "=" not in line:
            print(line)
    cheap = found["analytic"].argsort(1, descending=True)
    for most in (1, 2, 4, 6, 8, 10, 12):
        share = (cheap[:, :most] == task[:, None]).any(1).float().mean()
        print(f"among the {most} likeliest of analytic: {share:.4f}")


def milliseconds(run: Callable[[], object], device: str) -> float:
    times = []
    for _ in range(15):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 1e3 * sorted(times)[len(times) // 2]


def alone(net: rankup.IncrementalNet, x: Tensor) -> Tensor:
    batch = RoutedBatch(net, routing_of(net, x), x, {})
    return batch.routing.fits(batch, "analytic")


@torch.no_grad()
def costs(net: rankup.IncrementalNet, x: Tensor, device: str) -> None:
    tasks = len(net.tasks)
    one = milliseconds(lambda: net(x, task=tasks - 1), device)
    print(f"one task, {len(x)} samples: {one:.2f} ms")
    for name, run in (
        ("all tasks one by one", lambda: [net(x, task=task) for task in range(tasks)]),
        ("net(x)", lambda: net(x)),
        ("net(x, likeliest=8)", lambda: net(x, likeliest=8)),
        ("net(x, likeliest=4)", lambda: net(x, likeliest=4)),
        ("what routers see without the network", lambda: alone(net, x)),
    ):
        took = milliseconds(run, device)
        print(f"{name}: {took:.2f} ms, {took / one:.1f} times", flush=True)


@torch.no_grad()
def strangers(net: rankup.IncrementalNet, known: Tensor, given: argparse.Namespace) -> None:
    """How well images of no known task are told from known ones: of other data sets that lie beside
    CIFAR-100, and noise."""
    images = {"noise": torch.rand(2000, 3, 32, 32)}
    for name in ("mnist", "clothing", "mini-imagenet"):
        if (folder := Path(given.data) / name).exists():
            (task,) = make_stream(f"split:{folder}@32", tasks=1, progress=False)
            x = task.test_x[torch.randperm(len(task.test_x))[:2000]]
            images[name] = to_float(x).expand(-1, 3, -1, -1)
    own = strangeness(net, known, given)
    for name, x in images.items():
        scores = torch.cat([own, strangeness(net, x, given)])
        is_strange = torch.arange(len(scores)) >= len(own)
        print(f"AUROC against {name}: {roc_auc_score(is_strange, scores):.4f}", flush=True)


def strangeness(net: rankup.IncrementalNet, x: Tensor, given: argparse.Namespace) -> Tensor:
    return torch.cat([net.guess(x.to(given.device)).strangeness.cpu() for x in x.split(500)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--seed", type=int, default=7001)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rank", default="8,1")
    parser.add_argument("--seeded", default="16x")
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument(
        "--router", default=",".join(NAMES), help="their weights, such as energy=0.5,mahalanobis=…"
    )
    parser.add_argument("--features", type=int, default=1200)
    parser.add_argument("--batch", type=int, help="samples per step: 64, with rotations 128")
    parser.add_argument("--rotations", action="store_true", help="learn images in four turns")
    parser.add_argument("--views", type=int, default=1, help="4: also answer from four turns")
    parser.add_argument("--seconds", type=float, help="begin no task that would end after these")
    parser.add_argument(
        *("--per-class", "--limit"), type=int, help="few training samples, to try this script"
    )
    parser.add_argument("--patches", action="store_true", help="analytic features of images")
    parser.add_argument("--votes", type=Path, help="a folder to keep them in, to try more mixtures")
    parser.add_argument("--test", action="store_true", help="report test data")
    given = parser.parse_args()
    given.device = "cuda" if torch.cuda.is_available() else "cpu"
    whole = make_stream("s-cifar100", seed=given.seed, data=given.data, per_class=given.per_class)
    whole = whole.first(given.tasks)
    stream = whole if given.test else hold_out(whole, 0.1, given.seed)
    net = learn(stream, given)
    stream = stream.first(len(net.tasks))
    nets = {"one view": net}
    if given.views == 4:
        nets = {"one view": with_one_view(net, stream, given), "four views": net}
    for name, each in nets.items():
        told = [rankup.accuracy(each, task.to(given.device)) for task in stream]
        print(f"{name}: told {sum(told) / len(told):.4f}", flush=True)
    for name, each in nets.items():
        print(f"-- {name}", flush=True)
        report(each, stream, given, name)


def report(
    net: rankup.IncrementalNet, stream: rankup.data.Stream, given: argparse.Namespace, name: str
) -> None:
    size = net.size()
    print(f"numbers {size.bytes / 4:,.0f}, of routers {size.router_bytes / 4:,.0f}")
    parts: list[dict[str, Tensor]] = []
    tasks, labels = [], []
    for number, task in enumerate(stream):
        for x in to_float(task.test_x.to(given.device)).split(500):
            parts.append(seen(net, x))
        tasks.append(torch.full_like(task.test_y, number))
        labels.append(task.test_y)
    found = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    task, label = (torch.cat(each).to(given.device) for each in (tasks, labels))
    if given.votes is not None:
        votes = {key: tensor.half().cpu() for key, tensor in found.items()}
        votes |= {"task": task.cpu(), "label": label.cpu()}
        save_file(votes, given.votes / f"votes-{given.seed}-{name.replace(' ', '-')}.safetensors")
    assert net.router is not None
    mixtures(found, task, label, RouterRule.parse(net.router), not given.test)
    strangers(net, to_float(torch.cat([task.test_x[:100] for task in stream])), given)
    x = to_float(torch.cat([task.test_x[:100] for task in stream]).to(given.device))
    for count in (250, len(x)):
        costs(net, x[:count], given.device)


if __name__ == "__main__":
    main()
