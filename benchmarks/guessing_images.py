"""How many of all classes the analytic router finds by itself on images, without any network.

    PYTHONPATH=src python3 benchmarks/guessing_images.py DATA --router analytic,patches

Takes the router's sums over the tasks of S-CIFAR100, four fifths of the training data, and tries
its discriminants on the rest; then how well images of no known task are noticed, of the data sets
that lie beside CIFAR-100, and noise. Settings are chosen by this, on seeds and class orders that no
reported run uses; `--test` reports test data.
"""

import argparse
import time
from collections.abc import Iterator

import torch
from guessing import strangers
from torch import Tensor

import rankup
from rankup.data import make_stream, to_float
from rankup.data.heldout import hold_out
from rankup.net.guess import routing_of
from rankup.net.routers.base import Examples, RoutedBatch

BATCH = 250


def taken(stream: rankup.data.Stream, given: argparse.Namespace) -> rankup.IncrementalNet:
    """A network that learns nothing, so that only its router knows tasks."""
    numbers = stream[0].train_x[0].numel()
    module = rankup.models.mlp(numbers, hidden=[1])
    net = rankup.grow(module, rankup.Rank(1, 0), seed=given.seed, router=given.router)
    net.to(given.device)
    for task in stream:
        net.begin_task(task.name, classes=task.classes)
        net.commit_task(examples=examples(task.train_x, task.train_y, given.device))
    return net.eval()


def examples(x: Tensor, y: Tensor, device: str) -> Examples:
    def batches(most: int) -> Iterator[tuple[Tensor, Tensor, dict[str, object]]]:
        for images, labels in zip(x[:most].split(BATCH), y[:most].split(BATCH), strict=True):
            yield to_float(images.to(device)), labels.to(device), {}

    return Examples(lambda: batches(len(x)), lambda: batches(BATCH))


@torch.no_grad()
def tried(
    net: rankup.IncrementalNet, stream: rankup.data.Stream, device: str
) -> tuple[Tensor, Tensor]:
    """For each sample whether its class is found, and how many tasks seem likelier than its own."""
    right, before = [], []
    for number, task in enumerate(stream):
        for images, labels in zip(task.test_x.split(BATCH), task.test_y.split(BATCH), strict=True):
            batch = RoutedBatch(net, routing_of(net, images), to_float(images.to(device)), {})
            router = batch.routing.routers["analytic"]
            votes = router.votes(batch, batch.routing.fits(batch, "analytic"))
            classes = batch.cache["analytic"].classes.argmax(1).cpu()
            right.append(classes == batch.routing.columns(number).start + labels)
            before.append((votes > votes[:, number, None]).sum(1).cpu())
    return torch.cat(right), torch.cat(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--router", default="analytic,patches,features=1150")
    parser.add_argument("--stream", default="s-cifar100")
    parser.add_argument("--seed", type=int, default=7001)
    parser.add_argument("--per-class", type=int, help="few samples, to try this script")
    parser.add_argument("--test", action="store_true", help="report test data")
    given = parser.parse_args()
    given.device = "cuda" if torch.cuda.is_available() else "cpu"
    whole = make_stream(given.stream, seed=given.seed, data=given.data, per_class=given.per_class)
    stream = whole if given.test else hold_out(whole, 0.2, given.seed)
    started = time.perf_counter()
    net = taken(stream, given)
    right, before = tried(net, stream, given.device)
    numbers, took = net.size().router_bytes / 4, time.perf_counter() - started
    print(f"{net.router}: class {right.float().mean():.4f}")
    for most in (1, 2, 4, 8):
        print(f"task among the {most} likeliest {(before < most).float().mean():.4f}")
    print(f"numbers {numbers:,.0f}, {took:.0f} s on {given.device}", flush=True)
    strangers(net, to_float(torch.cat([task.test_x[:100] for task in stream])), given)


if __name__ == "__main__":
    main()
