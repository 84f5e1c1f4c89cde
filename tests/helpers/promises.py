"""Promises that a grown network keeps, whatever module it was grown from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankup

CLASSES = {"a": 2, "b": 3}


def assert_promises(make: Callable[[], nn.Module], batch: dict[str, Tensor], folder: Path) -> None:
    """Two tasks are learned; bits are kept, and mixed, merged and loaded answers agree."""
    net = rankup.grow(make(), rankup.Rank(2, 1), base="keep")
    samples = len(next(iter(batch.values())))
    labels = torch.arange(samples) % 2
    for task, classes in CLASSES.items():
        net.train()
        net.begin_task(task, classes)
        optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
        for _ in range(2):
            optimiser.zero_grad()
            F.cross_entropy(_logits(net(task=task, **batch)), labels).backward()
            optimiser.step()
        net.commit_task(calibrate=[(None, batch)])
        net.eval()
        if task == "a":
            before = _logits(net(task="a", **batch))
    with torch.no_grad():
        assert torch.equal(_logits(net(task="a", **batch)), before)
        tasks = torch.arange(samples) % 2
        mixed = _logits(net(task=tasks, **batch))
        for row, task in enumerate(tasks.tolist()):
            sample = {name: tensor[row : row + 1] for name, tensor in batch.items()}
            alone = _logits(net(task=task, **sample))[0]
            torch.testing.assert_close(mixed[row, : len(alone)], alone, rtol=1e-4, atol=1e-4)
        answer = _logits(net(task="b", **batch))
        merged = net.merged("b")
        torch.testing.assert_close(_logits(merged(**batch)), answer, rtol=1e-4, atol=1e-4)
        rankup.save(net, folder)
        loaded = rankup.load(folder, module=make())
        assert torch.equal(_logits(loaded(task="b", **batch)), answer)


def _logits(answer: Any) -> Tensor:
    logits: Tensor = getattr(answer, "logits", answer)
    return logits
