"""One measurement for peers.py: Avalanche learns permuted MNIST. Prints seconds and versions.

Runs in Avalanche's own environment, without rankup. No evaluation, metrics or loggers; making the
data sets is not timed.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

# Avalanche imports these for loggers, metrics, downloads and strategies that are not used here.
for unused in ("wandb", "GPUtil", "gdown", "qpsolvers"):
    sys.modules[unused] = ModuleType(unused)


def import_torchvision() -> str:
    """Its version, and whether its own operators are available."""
    try:
        import torchvision
    except RuntimeError:
        # They were compiled for another build of torch. Nothing here runs them, but torchvision
        # cannot be imported unless these are declared.
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
        import torchvision

        return f"{torchvision.__version__} without its compiled operators"
    return str(torchvision.__version__)


def own_benchmark(folder: Path, tasks: int) -> Any:
    """Avalanche's PermutedMNIST as it comes: every sample is permuted and normalised when read."""
    from avalanche.benchmarks.classic import PermutedMNIST

    return PermutedMNIST(tasks, seed=0, dataset_root=folder)


def tensor_benchmark(folder: Path, tasks: int) -> Any:
    """Tensors in memory that are already floating point and permuted."""
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.utils import as_classification_dataset
    from torchvision.datasets import MNIST

    mnist = MNIST(folder)
    pixels = mnist.data.flatten(1) / 255
    draw = torch.Generator().manual_seed(0)
    made = []
    for _ in range(tasks):
        permuted = pixels[:, torch.randperm(pixels.shape[1], generator=draw)]
        data: Any = TensorDataset(permuted, mnist.targets)
        data.targets = mnist.targets.tolist()  # where Avalanche looks for the classes
        made.append(as_classification_dataset(data))
    return benchmark_from_datasets(train=made)


def train(benchmark: Any, name: str, epochs: int, batch: int) -> float:
    """Seconds to learn all tasks; for EWC including the importances it computes after each."""
    from avalanche.models import SimpleMLP
    from avalanche.training import EWC, Naive
    from avalanche.training.plugins import EvaluationPlugin

    net = SimpleMLP(hidden_size=256, hidden_layers=2, drop_rate=0)
    common = {
        "model": net,
        "optimizer": torch.optim.Adam(net.parameters(), lr=1e-3),
        "criterion": nn.CrossEntropyLoss(),
        "train_mb_size": batch,
        "train_epochs": epochs,
        "evaluator": EvaluationPlugin(),
    }
    strategy = EWC(ewc_lambda=1.0, **common) if name == "EWC" else Naive(**common)
    started = time.perf_counter()
    for experience in benchmark.train_stream:
        strategy.train(experience)
    return time.perf_counter() - started


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.manual_seed(0)
    torch.set_num_threads(asked["threads"])
    torchvision = import_torchvision()
    make = tensor_benchmark if asked["feed"] == "tensors" else own_benchmark
    benchmark = make(Path(asked["data"]), asked["tasks"])
    seconds = train(benchmark, asked["strategy"], asked["epochs"], asked["batch"])
    versions = {
        "avalanche-lib": version("avalanche-lib"),
        "torch": torch.__version__,
        "torchvision": torchvision,
    }
    print(json.dumps({"seconds": seconds, "versions": versions}))


if __name__ == "__main__":
    main()
