"""Tables with ResNet18."""

from rankup.paper import ours, paper_values
from rankup.paper.experiment import Experiment
from rankup.paper.mlp import RIVALS
from rankup.paper.ours import RESNET_EPOCHS
from rankup.paper.tables import Row, Section, Table

STREAMS = ("s-cifar100", "s-miniimagenet")
_RIVALS_SEEDS = 2


def resnet18() -> Table:
    """Accuracy, forgetting and parameters of all methods with ResNet18."""
    sections = []
    for number, stream in enumerate(STREAMS):

        def figures(name: str, number: int = number) -> tuple[float | None, ...]:
            found = paper_values.RESNET18.get(name)
            return (*found[number], None) if found else (None, None, None)

        rows = [Row(method, _rival(stream, method), figures(method)) for method in RIVALS]
        rows += [
            Row(name, experiment, figures("rank"))
            for name, experiment in ours.rows(stream, "resnet18").items()
        ]
        rows += [
            Row("parallel full", _rival(stream, "parallel"), figures("parallel full")),
            Row("multitask", _rival(stream, "multitask"), figures("multitask")),
        ]
        title = paper_values.STREAMS[stream]
        sections.append(Section(title, ("accuracy", "forgetting", "parameters"), rows))
    note = (
        f"{RESNET_EPOCHS} epochs and width 20 where a row says no others; {_RIVALS_SEEDS} seeds of "
        "rivals. Most of the paper's figures for them are those of Chaudhry et al. 2020, of one "
        "epoch. The 1.33M parameters that it gives ours cannot be derived from its text."
    )
    return Table("ResNet18", sections, note)


def last_layers() -> Table:
    """Accuracy on S-CIFAR100 when only the last layers keep learning after the first task."""
    rows = [
        Row(
            f"last {last}",
            Experiment.of("s-cifar100", net="resnet18", last=last, epochs=RESNET_EPOCHS, seeds=3),
            (figure, None),
        )
        for last, figure in enumerate(paper_values.LAST_LAYERS, 1)
    ]
    rows.append(Row("all", ours.default("s-cifar100", "resnet18"), (None, None)))
    section = Section("S-CIFAR100, ResNet18", ("accuracy", "parameters"), rows)
    note = (
        f"{RESNET_EPOCHS} epochs; 3 seeds where not all layers go on. What comes before the last "
        "layers is dense and learned with the first task alone, which takes more to store than "
        "factors do."
    )
    return Table("Learning the last layers alone", [section], note)


def _rival(stream: str, method: str) -> Experiment:
    return Experiment.of(stream, method, net="resnet18", epochs=RESNET_EPOCHS, seeds=_RIVALS_SEEDS)
