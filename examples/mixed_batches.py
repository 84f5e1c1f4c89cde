"""Answers of a network that knows several tasks: mixed batches, merged modules, save and load.

python examples/mixed_batches.py
"""

import tempfile
from pathlib import Path

import torch

import rankup

EPOCHS = 30


@torch.no_grad()
def main() -> None:
    stream = rankup.data.make_stream("s-digits")
    net = rankup.grow(rankup.models.mlp(64, hidden=[64, 64]), rankup.Rank(first=8, step=1))
    for task in stream:
        rankup.fit(net, task, rankup.Recipe(epochs=EPOCHS))
    net.eval()

    # One pass for a batch in which every sample names its own task.
    x = rankup.data.to_float(torch.cat([task.test_x[:20] for task in stream]))
    y = torch.cat([task.test_y[:20] for task in stream])
    ids = torch.arange(len(stream)).repeat_interleave(20)
    mixed = net(x, task=ids)
    print(f"mixed batch of {len(stream)} tasks: {(mixed.argmax(1) == y).float().mean():.2%} right")

    # The same answers task by task, and from a plain module with dense weights.
    for index, name in enumerate(net.tasks):
        own = x[ids == index]
        torch.testing.assert_close(net(own, task=name), mixed[ids == index])
        torch.testing.assert_close(net.merged(name)(own), mixed[ids == index])

    with tempfile.TemporaryDirectory() as folder:
        rankup.save(net, folder)
        files = sorted(file.name for file in Path(folder, "tasks").iterdir())
        print(f"saved: {', '.join(files)}")
        loaded = rankup.load(folder)
        first = net.tasks[0]
        assert torch.equal(loaded(x, task=first), net(x, task=first))  # bit for bit
        print("loaded: the same bits")


if __name__ == "__main__":
    main()
