"""Tables with the three-layer MLP: accuracy, forgetting, and memory."""

from rankup.methods.settings import TUNED
from rankup.paper import ours, paper_values
from rankup.paper.experiment import Experiment
from rankup.paper.ours import EPOCHS
from rankup.paper.tables import Row, Section, Table

STREAMS = list(paper_values.STREAMS)
# In the order of the paper's table; those it has no figures for are next to their relatives.
RIVALS = [
    "finetune",
    "ewc",
    "icarl",
    "agem",
    "er-ring",
    "der",
    "hat",
    "packnet",
    "supsup",
    "wsn",
    "orthog",
    "nscl",
    "gpm",
    "ibpwf",
    "vera",
    "randlora",
]

_PROTOCOL = (
    "Every method has a head for each task, settings chosen on held-out training data (see "
    "docs/compare.md), and the same epochs where a row does not say others: {}."
)
PROTOCOL = _PROTOCOL.format(", ".join(f"{paper_values.STREAMS[s]} {n}" for s, n in EPOCHS.items()))
UNTUNED = [
    rival
    for rival in RIVALS
    if not all((TUNED / f"{stream}-mlp" / f"{rival}.json").exists() for stream in STREAMS)
]
if UNTUNED:
    PROTOCOL += f" Where these were not tuned, they have their defaults: {', '.join(UNTUNED)}."


def accuracy() -> Table:
    """Average accuracy after 20 tasks, all methods, four streams."""
    sections = [
        Section(
            title,
            ("accuracy", "buffer"),
            [
                *_rivals(stream, paper_values.ACCURACY),
                *_ours(stream, paper_values.ACCURACY["rank"][STREAMS.index(stream)]),
                *_bounds(stream, paper_values.ACCURACY),
            ],
        )
        for stream, title in paper_values.STREAMS.items()
    ]
    return Table("Average accuracy with the three-layer MLP", sections, PROTOCOL)


def forgetting() -> Table:
    """How much accuracy tasks lose after they were learned."""
    sections = [
        Section(
            title,
            ("forgetting",),
            [
                *(
                    Row(row.name, row.experiment, row.paper_values[:1])
                    for row in _rivals(stream, paper_values.FORGETTING)
                ),
                Row("rank", ours.default(stream), [0.0]),
                Row("parallel full", _parallel(stream, "full"), [0.0]),
            ],
        )
        for stream, title in paper_values.STREAMS.items()
    ]
    return Table("Forgetting with the three-layer MLP", sections, PROTOCOL)


def memory() -> Table:
    """Parameters and replay buffers on S-CIFAR100, in 32-bit numbers; masks count by their bits."""
    stream = "s-cifar100"
    rows = [
        Row(name, rival(stream, name), paper_values.MEMORY.get(name, (None, None)))
        for name in RIVALS
    ]
    rows.append(Row("rank", ours.default(stream), paper_values.MEMORY["rank"]))
    full = paper_values.MEMORY["parallel full"]
    rows.append(Row("parallel full", _parallel(stream, "full"), full))
    section = Section(paper_values.STREAMS[stream], ("parameters", "buffer"), rows)
    return Table("What methods store after 20 tasks", [section])


def masks() -> Table:
    """Parameters of the methods that never forget."""
    sections = []
    for number, stream in enumerate(("p-mnist", "s-cifar100", "s-miniimagenet")):
        rows = [
            Row(name, rival(stream, name), (paper_values.MASKS.get(name, (None,) * 3)[number],))
            for name in ("hat", "packnet", "supsup", "wsn", "ibpwf")
        ]
        rows.append(Row("rank", ours.default(stream), (paper_values.MASKS["rank"][number],)))
        sections.append(Section(paper_values.STREAMS[stream], ("parameters",), rows))
    return Table("Parameters of methods that never forget", sections)


def rival(stream: str, method: str) -> Experiment:
    return Experiment.of(stream, method, epochs=EPOCHS[stream])


def _parallel(stream: str, size: str) -> Experiment:
    return Experiment.of(stream, "parallel", size=size, epochs=EPOCHS[stream])


def _rivals(stream: str, figures: dict[str, tuple[float | None, ...]]) -> list[Row]:
    return [Row(m, rival(stream, m), (_figure(figures, m, stream), None)) for m in RIVALS]


def _ours(stream: str, figure: float | None) -> list[Row]:
    paper = f"rank, paper's recipe, {ours.PAPER_EPOCHS} epochs"
    experiments = {paper: ours.by_the_paper(stream)} | ours.rows(stream)
    return [Row(name, experiment, (figure, None)) for name, experiment in experiments.items()]


def _bounds(stream: str, figures: dict[str, tuple[float | None, ...]]) -> list[Row]:
    rows = [
        Row(f"parallel {size}", _parallel(stream, size), (_figure(figures, name, stream), None))
        for size, name in (("2", "parallel 2"), ("4", "parallel 4"), ("full", "parallel full"))
    ]
    epochs = EPOCHS[stream]
    # On split streams the paper's figure is for one head over all classes.
    split = stream.startswith("s-")
    figure = _figure(figures, "multitask", stream)
    rows.append(
        Row(
            "multitask",
            Experiment.of(stream, "multitask", epochs=epochs),
            (None if split else figure, None),
        )
    )
    if split:
        single = Experiment.of(stream, "multitask", single_head=True, epochs=epochs)
        rows.append(Row("multitask, one head", single, (figure, None)))
    return rows


def _figure(figures: dict[str, tuple[float | None, ...]], name: str, stream: str) -> float | None:
    return figures.get(name, (None,) * len(STREAMS))[STREAMS.index(stream)]
