"""The table of accuracy without being told the task: class-incremental on streams that split their
classes, domain-incremental on those that change the inputs of the same classes."""

from typing import Any

from rankup.paper import ours
from rankup.paper.experiment import Experiment
from rankup.paper.ours import EPOCHS, RESNET_EPOCHS
from rankup.paper.tables import Measure, Row, Section, Table

_MEASURES: tuple[Measure, ...] = ("untold", "guessed", "accuracy", "parameters", "buffer")

# Last accuracy on S-CIFAR100 in 20 tasks from scratch, in per cent, as papers print it, and after
# a semicolon how many samples they keep. None of it was measured here.
PUBLISHED = {
    "HAT, all logits (printed)": 25.6,
    "CLOM, four views (printed)": 54.7,
    "DCNet (printed)": 58.4,
    "SupSup with CLOM's training (printed)": 59.3,
    "iCaRL, 2,000 samples (printed)": 47.8,
    "TPL, 2,000 samples (printed)": 55.8,
    "DER, 2,000 samples (printed)": 62.5,
}

# Chosen on class orders and seeds that no run here uses; but the mixture for ResNet18 was only
# tried once, and `benchmarks/guessing.py` is there to choose it.
MNIST_ROUTER = "analytic,features=1250"
PERMUTED_ROUTER = "means"
RESNET_ROUTER = "energy,mahalanobis=0.1"

_NOTE = (
    "Nobody is told the task: right is the class among those of all tasks, on P-MNIST the digit, "
    "adding up over tasks. 'task guessed' is the share of samples whose task was guessed; "
    "'accuracy' is with the task told, as in all other tables. Rivals answer by their largest "
    "logit, iCaRL by the nearest mean and multitask by one head over all classes; DER++ learns to "
    "tell all classes so far apart. One seed of rivals on S-CIFAR100. Figures marked 'printed' are "
    "from papers, with networks and epochs of their own."
)


def class_incremental() -> Table:
    """How right methods are without being told the task."""
    sections = [
        Section("P-MNIST", _MEASURES, [*_rivals("p-mnist", EPOCHS["p-mnist"]), _permuted()]),
        Section("S-MNIST, five tasks", _MEASURES, [*_rivals("s-mnist", 5), _split()]),
        Section("S-CIFAR100, ResNet18", _MEASURES, [*_on_cifar(), *_printed()]),
    ]
    return Table("Without being told the task", sections, _NOTE)


def _rivals(stream: str, epochs: int) -> list[Row]:
    methods = ("finetune", "ewc", "icarl", "er-ring", "der", "hat", "packnet", "supsup", "wsn")
    rows = [_rival(stream, name, epochs=epochs) for name in methods]
    whole = Experiment.of(stream, "multitask", epochs=epochs, single_head=True, untold=True)
    return [*rows, Row("multitask, one head", whole, _nothing())]


def _rival(stream: str, method: str, **values: Any) -> Row:
    if method == "der":
        values |= {"among": "all", "labels": 0.5}
    name = "der++" if method == "der" else method
    return Row(name, Experiment.of(stream, method, untold=True, **values), _nothing())


def _permuted() -> Row:
    settings = ours.BEST["p-mnist", "mlp"]
    experiment = Experiment.of("p-mnist", router=PERMUTED_ROUTER, untold=True, **settings)
    return Row(f"rank, seeded, {PERMUTED_ROUTER}", experiment, _nothing())


def _split() -> Row:
    experiment = Experiment.of("s-mnist", router=MNIST_ROUTER, epochs=5, untold=True)
    return Row(f"rank, {MNIST_ROUTER}", experiment, _nothing())


def _on_cifar() -> list[Row]:
    methods = ("finetune", "icarl", "er-ring", "der", "hat", "packnet", "supsup", "wsn")
    rows = [
        _rival("s-cifar100", name, net="resnet18", epochs=RESNET_EPOCHS, seeds=1)
        for name in methods
    ]
    best = ours.BEST["s-cifar100", "resnet18"]
    experiment = Experiment.of(
        "s-cifar100", net="resnet18", router=RESNET_ROUTER, untold=True, **best
    )
    return [*rows, Row(f"rank, seeded, {RESNET_ROUTER}", experiment, _nothing())]


def _printed() -> list[Row]:
    return [Row(name, None, (value, *_nothing()[1:])) for name, value in PUBLISHED.items()]


def _nothing() -> tuple[float | None, ...]:
    return (None,) * len(_MEASURES)
