"""The pictures of docs/guessing.md: a run of S-MNIST that was tested with `--untold`, and what
`guessing_texts.py --scores FILE` has found.

    PYTHONPATH=src python3 benchmarks/guessing_pictures.py RUN DATA SCORES docs/images
"""

import argparse
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import rankup
from rankup.data import make_stream, to_float
from rankup.runs.read import Run, read_run


def confusion(run: Run, data: str) -> plt.Figure:
    """How often samples of a task, in its row, are taken for one of another."""
    net = rankup.load(run.path / "net")
    stream = make_stream("s-mnist", seed=run.config["seed"], data=data)
    table = np.zeros((len(stream), len(stream)))
    for row, task in enumerate(stream):
        parts = torch.split(to_float(task.test_x), 500)
        found = torch.cat([net.guess(x).task for x in parts])
        table[row] = np.bincount(found.numpy(), minlength=len(stream)) / len(found)
    figure, axes = plt.subplots(figsize=(4.6, 3.8), layout="constrained")
    axes.imshow(table, cmap="Blues", vmin=0, vmax=1)
    for (row, column), share in np.ndenumerate(table):
        colour = "white" if share > 0.5 else "black"
        axes.text(column, row, f"{100 * share:.1f}", ha="center", va="center", color=colour)
    names = [" and ".join(task.class_names) for task in stream]
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="guessed task", ylabel="task", title="S-MNIST, per cent of test samples")
    return figure


def by_tasks(run: Run) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
    assert run.untold is not None
    assert run.guessed is not None
    known = range(1, len(run.lines) + 1)
    for name, matrix in (("told", run.matrix), ("task", run.guessed), ("untold", run.untold)):
        axes.plot(known, 100 * matrix.average_accuracies(), marker="o", label=name)
    axes.set(xlabel="tasks learned", ylabel="accuracy %", title="S-MNIST", xticks=known)
    axes.legend()
    return figure


def strangeness(scores: dict[str, torch.Tensor]) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
    bins = np.linspace(-4, 8, 61)
    for name, values in scores.items():
        axes.hist(values.numpy(), bins, density=True, alpha=0.6, label=name)
    axes.set(xlabel="strangeness", ylabel="density", title="CLINC150's test requests")
    axes.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("run", "data", "scores", "out"):
        parser.add_argument(name)
    given = parser.parse_args()
    run, out = read_run(given.run, selectors=False), Path(given.out)
    figures = {
        "confusion": confusion(run, given.data),
        "tasks": by_tasks(run),
        "strange": strangeness(torch.load(given.scores)),
    }
    for name, figure in figures.items():
        figure.savefig(out / f"guessing-{name}.png", dpi=110)


if __name__ == "__main__":
    sys.exit(main())
