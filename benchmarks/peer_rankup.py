"""One measurement for peers.py: rankup learns permuted MNIST. Prints seconds and versions.

The short check and the calibration at the end of `fit` are timed, too.
"""

import json
import sys
import time
from dataclasses import replace

import torch

import rankup


def train(tasks: int, epochs: int, batch: int, samples: int) -> float:
    """Seconds to learn all tasks."""
    stream = rankup.data.make_stream("p-mnist", tasks=tasks, progress=False)
    subset = [
        replace(task, train_x=task.train_x[:samples], train_y=task.train_y[:samples])
        for task in stream
    ]
    net = rankup.grow(rankup.models.mlp(784), rankup.Rank(first=11, step=1))
    recipe = rankup.Recipe(epochs=epochs, batch=batch)
    started = time.perf_counter()
    for task in subset:
        rankup.fit(net, task, recipe)
    return time.perf_counter() - started


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    seconds = train(asked["tasks"], asked["epochs"], asked["batch"], asked["samples"])
    versions = {"rankup": rankup.__version__, "torch": torch.__version__}
    print(json.dumps({"seconds": seconds, "versions": versions}))


if __name__ == "__main__":
    main()
