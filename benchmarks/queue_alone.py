"""The queue without HTTP, for `serving.py`: an MLP on one core, ResNet18 on a GPU, and MiniLM with
tasks of ours beside PEFT's adapters. Each way is timed in turn with the others."""

import asyncio
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import wait
from torch import Tensor

import rankup
from rankup.inference.answering import probabilities
from rankup.inference.batcher import Batcher
from rankup.net.network import IncrementalNet

TASKS = 20
Measured = dict[str, Any]
Ways = dict[str, Callable[[], float]]  # each tells how many seconds an input took


def mlp(tasks: int = TASKS, rank: rankup.Rank | None = None) -> IncrementalNet:
    net = rankup.grow(rankup.models.mlp(784, hidden=[256, 256]), rank or rankup.Rank(11, 1))
    for number in range(tasks):
        net.begin_task(f"t{number:02}", 10)
        net.commit_task()
    return net.eval()


def resnet() -> IncrementalNet:
    net = rankup.grow(rankup.models.resnet18(20, 32), rankup.Rank(11, 1))
    for number in range(TASKS):
        net.begin_task(f"t{number:02}", 5)
        net.commit_task(calibrate=[torch.rand(8, 3, 32, 32)])
    return net.eval()


class Asking:
    """Inputs for 20 tasks in turn, and ways to have a network answer them.

    Args:
        inputs: `[N, …]`, on the CPU, where requests come from.
        device: where the network is.
    """

    def __init__(self, net: Any, inputs: Tensor, device: str = "cpu") -> None:
        self.net, self.inputs, self.device = net, inputs, device
        self.items = [x.clone() for x in inputs]
        self.names = [f"t{index % TASKS:02}" for index in range(len(inputs))]
        # On the CPU seconds of the processor, which others on the machine disturb less.
        self.clock = time.process_time if device == "cpu" else time.perf_counter

    @torch.inference_mode()
    def bare(self) -> float:
        """Calls of the network, one at a time."""
        few = len(self.items) // 8
        began = self.clock()
        for x, name in zip(self.items[:few], self.names, strict=False):
            probabilities(self.net(x[None].to(self.device), task=name))
        return (self.clock() - began) / few

    def clients(self, most: int, count: int, inline: bool = False, share: int = 1) -> float:
        """So many clients who each ask about one input and wait; for a share of all inputs."""
        items = self.items[::share]

        async def client(batcher: Batcher, first: int) -> None:
            for index in range(first, len(items), count):
                await batcher.submit(items[index], self.names[index])

        return self._asked(
            most, inline, len(items), lambda batcher: [client(batcher, n) for n in range(count)]
        )

    def callers(self, most: int, inline: bool = False, waiting: int = 4) -> float:
        """Callers who each ask about as many inputs at once as a batch has, and wait."""
        starts = range(0, len(self.items), most)

        async def caller(batcher: Batcher, first: int) -> None:
            for at in starts[first::waiting]:
                batch = slice(at, at + most)
                await batcher.submit_many(self.inputs[batch], self.names[batch])

        return self._asked(
            most,
            inline,
            len(self.items),
            lambda batcher: [caller(batcher, n) for n in range(waiting)],
        )

    def _asked(
        self, most: int, inline: bool, count: int, who: Callable[[Batcher], list[Any]]
    ) -> float:
        async def main() -> float:
            loop = asyncio.get_running_loop()
            longest = max(1024, 4 * most)
            with Batcher(
                self.net,
                most,
                2,
                longest,
                finish=probabilities,
                loop=loop,
                inline=inline,
                device=self.device,
            ) as batcher:
                began = self.clock()
                await asyncio.gather(*who(batcher))
                return self.clock() - began

        return asyncio.run(main()) / count


def compared(ways: Ways, over: str, rounds: int) -> Measured:
    """All ways in turn, again and again: the best of each, and the median of what the rounds say
    about each over one of them."""
    for way in ways.values():
        way()
    gc.collect()
    gc.freeze()  # as the server does
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(way())
    gc.unfreeze()

    def ratio(name: str) -> float:
        pairs = zip(seconds[over], seconds[name], strict=True)
        return statistics.median(base / own for base, own in pairs)

    return {
        "microseconds": {name: 1e6 * min(each) for name, each in seconds.items()},
        f"over {over}": {name: ratio(name) for name in ways if name != over},
    }


def queue(rounds: int = 25) -> Measured:
    """MLP of 20 tasks on one core; batches run on the event loop, as the server runs them."""
    torch.set_num_threads(1)
    asking = Asking(mlp(), torch.rand(2048, 784))
    ways: Ways = {
        "bare calls": asking.bare,
        "queue, one at a time": lambda: asking.clients(1, 64, share=8),
        "64 clients, in a thread": lambda: asking.clients(64, 64),
        "64 clients": lambda: asking.clients(64, 64, inline=True),
        "callers of 64": lambda: asking.callers(64, inline=True),
        "callers of 256": lambda: asking.callers(256, inline=True),
    }
    return compared(ways, "bare calls", rounds)


def queue_on(device: str, rounds: int = 5, count: int = 2048) -> Measured:
    """ResNet18 of width 20 with 20 tasks, on a GPU."""
    asking = Asking(resnet().to(device), torch.rand(count, 3, 32, 32), device)
    ways: Ways = {
        "bare calls": asking.bare,
        "queue, one at a time": lambda: asking.clients(1, 64, share=8),
        "64 clients": lambda: asking.clients(64, 64),
        "256 clients": lambda: asking.clients(256, 256),
        "callers of 64": lambda: asking.callers(64),
        "callers of 256": lambda: asking.callers(256),
        "callers of 1024": lambda: asking.callers(1024),
    }
    wait(device)
    return compared(ways, "bare calls", rounds)


def peft(weights: Path | None, rounds: int = 5) -> Measured:
    """MiniLM with 20 tasks of ours against 20 LoRA adapters of rank 8 in the same queue, for texts
    of several lengths. Ours have 8 factors for the first task and 1 for each later one, from all of
    which every task selects; or 8 for each."""
    ours = {
        f"rankup {rank.first}, {rank.step}": _minilm_of_ours(weights, rank)
        for rank in (rankup.Rank(8, 1), rankup.Rank(8, 8))
    }
    module = _minilm(weights)
    nets = {
        "PEFT": _minilm_of_theirs(weights),
        **ours,
        "the module without tasks": lambda x, task: module(x),
    }
    torch.set_num_threads(1)
    results: Measured = {"weights": "all-MiniLM-L6-v2" if weights else "random"}
    for length in (8, 16, 32):
        for most in (16, 64):
            drawn = torch.randint(1, 30_000, (128, length))
            ways: Ways = {
                name: partial(Asking(net, drawn).clients, most, most) for name, net in nets.items()
            }
            results[f"{length} tokens, batches of {most}"] = compared(ways, "PEFT", rounds)
    return results


def _minilm(weights: Path | None) -> Any:
    # A torchvision that does not fit torch would keep transformers from being imported.
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
    import transformers

    kind = transformers.AutoModelForSequenceClassification
    if weights is not None:
        return kind.from_pretrained(weights, num_labels=2).eval()
    return kind.from_config(
        transformers.BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
        )
    ).eval()


def _minilm_of_ours(weights: Path | None, rank: rankup.Rank) -> IncrementalNet:
    net = rankup.grow(_minilm(weights), rank, base="keep")
    for number in range(TASKS):
        net.begin_task(f"t{number:02}", 2)
        net.commit_task()
    return net.eval()


def _minilm_of_theirs(weights: Path | None) -> Callable[..., Any]:
    module = _minilm(weights)
    import peft as library

    warnings.filterwarnings("ignore", module="peft")
    options: dict[str, Any] = {
        "target_modules": ["query", "key", "value", "dense"],
        "r": 8,
        "task_type": "SEQ_CLS",
    }
    adapted: Any = library.get_peft_model(module, library.LoraConfig(**options), "t00")
    for number in range(1, TASKS):
        adapted.add_adapter(f"t{number:02}", library.LoraConfig(**options))
    adapted.eval()

    def answer(x: Tensor, task: str | Sequence[str]) -> Any:
        return adapted(x, adapter_names=[task] * len(x) if isinstance(task, str) else list(task))

    return answer
