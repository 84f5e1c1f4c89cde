"""A training loop of one's own: any optimiser, schedule and loader over `net.parameters()`.

python examples/own_loop.py --epochs 20
"""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import rankup


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)

    net = rankup.grow(rankup.models.mlp(64, hidden=[64, 64]), rankup.Rank(first=8, step=2))
    for task in rankup.data.make_stream("s-digits").first(3):
        x, y = rankup.data.to_float(task.train_x), task.train_y
        loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)

        net.train()
        net.begin_task(task.name, task.classes, selectors="previous")
        # Only now: between tasks a network has no parameters.
        optimiser = torch.optim.AdamW(net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, options.epochs)
        for _ in range(options.epochs):
            for inputs, labels in loader:
                optimiser.zero_grad()
                F.cross_entropy(net(inputs, task=task.name), labels).backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimiser.step()
            schedule.step()
        # A network with batch norm also needs `calibrate=(inputs for inputs, _ in loader)`.
        net.commit_task()

        net.eval()
        with torch.no_grad():
            answers = net(rankup.data.to_float(task.test_x), task=task.name).argmax(1)
        print(f"{task.name}: {(answers == task.test_y).float().mean():.2%}")


if __name__ == "__main__":
    main()
