"""A pretrained module learns further tasks: its weights stay, factors of little rank add to them.

    python examples/pretrained.py

A small network stands for the pretrained one: it is trained on all ten digits as they are. The new
tasks turn the digits, each by an angle of its own. `base="keep"` works the same way for a module
of timm, torchvision or transformers.
"""

import torch
import torch.nn.functional as F
from torch import nn

import rankup
from rankup.data import Task, make_stream, to_float

NEW_TASKS = 2
EPOCHS = 10


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.classify = nn.Linear(32 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.conv1(x).relu(), 2)
        return self.classify(F.max_pool2d(self.conv2(x).relu(), 2).flatten(1))


def pretrained(task: Task) -> ConvNet:
    """A module that has learned the task in the usual way."""
    torch.manual_seed(0)
    module, x = ConvNet(), to_float(task.train_x)
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        F.cross_entropy(module(x), task.train_y).backward()
        optimiser.step()
    return module


def main() -> None:
    module = pretrained(make_stream("p-digits", tasks=1)[0])
    net = rankup.grow(module, rankup.Rank(first=4, step=2), base="keep", head="classify")
    for task in make_stream("r-digits", tasks=NEW_TASKS):
        rankup.fit(net, task, rankup.Recipe(epochs=EPOCHS))
        added = net.size(task=task.name).total
        print(f"{task.name}: {rankup.accuracy(net, task):.2%}, {added:,} numbers added")
    print(f"{net.size().dense:,} numbers of the module itself are stored once")


if __name__ == "__main__":
    main()
