"""A sweep on a Ray cluster: five backbones by four ranks by three seeds, each a Ray task.

    pip install 'rankup[ray,real]'
    python examples/sweep_ray.py                      # two simulated nodes of a CPU each
    python examples/sweep_ray.py --address auto       # a cluster that runs already
    python examples/sweep_ray.py --backbones resnet10t --seeds 1

Nothing here is special to rankup: a task grows a backbone of timm and learns two tasks; Ray packs
60 of them onto the nodes that there are, and runs again what is lost with one.
"""

import argparse
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

BACKBONES = ("resnet10t", "resnet18", "regnetx_002", "convnext_atto", "darknet17")
RANKS = (1, 2, 4, 8)
SEEDS = 3


def score(backbone: str, rank: int, seed: int) -> tuple[float, int]:
    """The mean accuracy on two tasks, and how many numbers the second one added."""
    import timm
    import torch

    import rankup
    from rankup.data import make_stream

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    module = timm.create_model(backbone, num_classes=10, in_chans=1)  # pretrained=True with weights
    net = rankup.grow(module, rankup.Rank(first=rank, step=rank), base="keep", seed=seed)
    stream = make_stream("s-digits", tasks=2, seed=seed)
    recipe = rankup.Recipe(epochs=2, batch=20, lr=0.003)
    for task in stream:
        rankup.fit(net, _enlarged(task), recipe)
    accuracies = [rankup.accuracy(net, _enlarged(task), recipe) for task in stream]
    return statistics.mean(accuracies), net.size(task=stream[1].name).total


def _enlarged(task):
    """Backbones halve images five times: 8 by 8 pixels are too few."""
    import dataclasses

    from torch.nn.functional import interpolate

    def larger(x):
        return interpolate(x[:200].float(), scale_factor=4).byte()

    return dataclasses.replace(
        task,
        train_x=larger(task.train_x),
        train_y=task.train_y[:200],
        test_x=larger(task.test_x),
        test_y=task.test_y[:200],
    )


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    import ray
    from ray.cluster_utils import Cluster

    quiet = {"log_to_driver": False, "logging_level": "error"}
    if address:
        ray.init(address, **quiet)
    else:
        head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20}
        nodes = Cluster(initialize_head=True, head_node_args=head)
        nodes.add_node(num_cpus=1, object_store_memory=80 * 2**20)
        ray.init(nodes.address, **quiet)
    try:
        yield
    finally:
        ray.shutdown()
        if not address:
            nodes.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--address")
    parser.add_argument("--backbones", nargs="+", default=BACKBONES)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    asked = parser.parse_args()
    import ray

    with connected(asked.address):
        remote = ray.remote(num_cpus=1, max_retries=3)(score)
        running = {
            (backbone, rank): [remote.remote(backbone, rank, seed) for seed in range(asked.seeds)]
            for backbone in asked.backbones
            for rank in asked.ranks
        }
        print(f"{'backbone':20} {'rank':>4} {'accuracy %':>14} {'numbers per task':>17}")
        for (backbone, rank), runs in running.items():
            found = ray.get(runs)
            accuracies, added = [100 * accuracy for accuracy, _ in found], found[0][1]
            accuracy = f"{statistics.mean(accuracies):.1f}"
            if len(accuracies) > 1:
                accuracy += f" ± {statistics.stdev(accuracies):.1f}"
            print(f"{backbone:20} {rank:4} {accuracy:>14} {added:17,}", flush=True)


if __name__ == "__main__":
    main()
